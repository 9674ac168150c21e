-- Signs of life and other small writes, beside the fence.

-- beat: {kind, id}, payload what it says of itself, or '' of one that leaves, or is long gone; kind: of presence_key
--   -> {beaten} | {full}
-- What it says is data for its readers, behind the ms at which it came, and bounded: in bytes, and in how many say something.
local MAX_ID, MAX_BYTES, MAX_KNOWN = 256, 65536, 10000
local key, info = presence_key(a.kind), payload()
if #a.id > MAX_ID or #info > MAX_BYTES then return { 'full' } end
if info == '' then
  redis.call('HDEL', key, a.id)
elseif redis.call('HLEN', key) >= MAX_KNOWN and redis.call('HEXISTS', key, a.id) == 0 then
  return { 'full' }
else
  redis.call('HSET', key, a.id, whole(now_ms()) .. ' ' .. info)
end
return { 'beaten' }

-- present: {kind} -> {present, ms, n x (id, the ms at which it spoke and what it said)}; kind: of presence_key
local out = { 'present', whole(now_ms()) }
for _, word in ipairs(redis.call('HGETALL', presence_key(a.kind))) do out[#out + 1] = word end
return out

-- report_spans: {max_reports}, payload TimelineSpans -> {reported} | {refused}: too large, or of a job that was removed
local spans = payload()
if #spans > 65536 or redis.call('HEXISTS', JOB, 'state') == 0 then return { 'refused' } end
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
