-- Signs of life and other small writes, next to the fence.

-- beat: {kind, id}
-- Notes that a process lives, and what it says of itself.
--   kind     The kind of process, as `presence_key` takes it.
--   id       The id of the process.
--   payload  its record, or '' of one that leaves, or is long gone
--   -> {beaten} | {full} | OOM, of a new process at maxmemory
-- What it says is data for its readers, behind the ms at which it came, and bounded: in bytes, and in how many say
-- something. The more are known the less each may say: all together stay below 90 MB. One that is known may always say
-- as much as it did, or a little:
-- it lives, and must not be taken for dead.
-- At maxmemory a known one goes on. A new one is let in while few are known: a run may need it to go on, and to free
-- memory. So what they say past the limit is a quarter of a megabyte.
-- Keys:
--   onbeat:S:KIND   read: how many are known; written: the id -> 'MS RECORD', ms of Unix time; removed where it leaves
local MAX_ID = 256
local MAX_KNOWN = 10000
local MAX_BYTES = 65536
local ALL_BYTES = 2 ^ 24
local LITTLE_BYTES = 4096
local MAX_KNOWN_WHEN_FULL = 64
local key = presence_key(a.kind)
local info = payload()
if type(a.id) ~= 'string' or #a.id > MAX_ID then return { 'full' } end
if info == '' then
  redis.call('HDEL', key, a.id)
  return { 'beaten' }
end
-- The ms are the server's, so that a reader needs no clock of the worker's.
local entry = whole(now_ms()) .. ' ' .. info
local num_known = redis.call('HLEN', key)
local bytes_before = redis.call('HSTRLEN', key, a.id)
-- HSTRLEN is 0 of an id that isn't there: an entry has its time at least.
local is_new = bytes_before == 0
if is_new and num_known >= MAX_KNOWN_WHEN_FULL then require_room({}, 1) end
if is_new and num_known >= MAX_KNOWN then return { 'full' } end
local most = math.max(bytes_before, LITTLE_BYTES)
-- At maxmemory no process may say more than before; else all share ALL_BYTES.
if not IS_FULL then most = math.max(most, math.min(MAX_BYTES, math.floor(ALL_BYTES / math.max(num_known, 1)))) end
if #entry > most then return { 'full' } end
redis.call('HSET', key, a.id, entry)
return { 'beaten' }

-- present: {kind}
-- Lists the processes of a kind.
--   kind   The kind of process, as `presence_key` takes it.
--   -> {present, ms of the server's clock, n x (id, 'MS RECORD': when it beat, and its record)}
-- Keys:
--   onbeat:S:KIND   read: each id and what it said last
local out = { 'present', whole(now_ms()) }
for _, word in ipairs(redis.call('HGETALL', presence_key(a.kind))) do out[#out + 1] = word end
return out

-- report_spans: {max_reports}
-- Adds a report of spans to a job's timeline.
--   max_reports  Entries of the stream that stay, the newest.
--   payload      TimelineSpans
--   -> {reported}
--    | {refused}   the job was removed
-- Keys:
--   job     read: whether the job exists
--   spans   written: TimelineSpans
local spans = payload()
if redis.call('HEXISTS', JOB, 'state') == 0 then return { 'refused' } end
redis.call('XADD', sealed_key('spans'), 'MAXLEN', whole(math.min(a.max_reports, 256)), '*', 'spans', spans)
return { 'reported' }

-- write: {command, name}
-- Runs one small write that goes on at maxmemory. Its callers may do the same by hand.
--   command   The command of Redis.
--   name      The name of a key of the job, or of one of the server's where the call is of no job.
--   payloads  the arguments behind the key
--   -> the command's answer; nil where the job was removed, and nothing is written
-- Keys:
--   job           read: whether the job exists
--   onbeat:NAME   written by a call of no job
--   NAME          written by a call of a job; `spans` alone is sealed
if JOB_ID == '' then return redis.call(a.command, 'onbeat:' .. a.name, unpack(ARGUMENTS, 4)) end
if redis.call('HEXISTS', JOB, 'state') == 0 then return false end
return redis.call(a.command, a.name == 'spans' and sealed_key(a.name) or job_key(a.name), unpack(ARGUMENTS, 4))

-- seal: {}
-- Returns the secret part of sealed names, to the roles that may read such keys by themselves.
--   -> {seal, the secret part}
-- Keys: none.
return { 'seal', SEAL }
