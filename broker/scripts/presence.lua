-- Signs of life and other small writes, beside the fence.

-- beat: {kind, id}, payload what it says of itself, or '' of one that leaves, or is long gone; kind: of presence_key
--   -> {beaten} | {full} | OOM, of one that is new at maxmemory
-- What it says is data for its readers, behind the ms at which it came, and bounded: in bytes, and in how many say something. The more
-- are known the less each may say: all together stay below 90 MB. One that is known may always say as much as it did, or a little:
-- it lives, and must not be taken for dead.
-- At maxmemory a known one goes on. A new one is let in while few are known: a run may need it to go on, and to free memory. So
-- what they say past the limit is a quarter of a megabyte.
local MAX_ID, MAX_KNOWN, MAX_BYTES, ALL_BYTES, LITTLE_BYTES, MAX_KNOWN_WHEN_FULL = 256, 10000, 65536, 2 ^ 24, 4096, 64
local key, info = presence_key(a.kind), payload()
if type(a.id) ~= 'string' or #a.id > MAX_ID then return { 'full' } end
if info == '' then
  redis.call('HDEL', key, a.id)
  return { 'beaten' }
end
local entry, num_known, bytes_before = whole(now_ms()) .. ' ' .. info, redis.call('HLEN', key), redis.call('HSTRLEN', key, a.id)
local is_new = bytes_before == 0
if is_new and num_known >= MAX_KNOWN_WHEN_FULL then require_room({}, 1) end
if is_new and num_known >= MAX_KNOWN then return { 'full' } end
local most = math.max(bytes_before, LITTLE_BYTES)
if not IS_FULL then most = math.max(most, math.min(MAX_BYTES, math.floor(ALL_BYTES / math.max(num_known, 1)))) end
if #entry > most then return { 'full' } end
redis.call('HSET', key, a.id, entry)
return { 'beaten' }

-- present: {kind} -> {present, ms, n x (id, the ms at which it spoke and what it said)}; kind: of presence_key
local out = { 'present', whole(now_ms()) }
for _, word in ipairs(redis.call('HGETALL', presence_key(a.kind))) do out[#out + 1] = word end
return out

-- report_spans: {max_reports}, payload TimelineSpans -> {reported} | {refused}: of a job that was removed
local spans = payload()
if redis.call('HEXISTS', JOB, 'state') == 0 then return { 'refused' } end
redis.call('XADD', sealed_key('spans'), 'MAXLEN', whole(math.min(a.max_reports, 256)), '*', 'spans', spans)
return { 'reported' }

-- write: {command, name}, payloads its arguments; name: of a key of the job, of one of the server's where the call is of no job
--   -> the command's answer, nil where the job was removed: of one nothing comes back
-- One small write that goes on at maxmemory. Its callers may do the same by hand.
if JOB_ID == '' then return redis.call(a.command, 'onbeat:' .. a.name, unpack(ARGUMENTS, 4)) end
if redis.call('HEXISTS', JOB, 'state') == 0 then return false end
return redis.call(a.command, a.name == 'spans' and sealed_key(a.name) or job_key(a.name), unpack(ARGUMENTS, 4))

-- seal: {} -> {seal, the secret part of sealed names}: for those that read such keys beside the functions, and may
return { 'seal', SEAL }
