-- beat: {kind, id}, payload what it says of itself, or '' of one that leaves, or is long gone; kind: of presence_key
--   -> {beaten} | {full}
-- What it says is data for its readers, and bounded: in bytes, and in how many say something.
local MAX_ID, MAX_BYTES, MAX_KNOWN = 256, 65536, 10000
local key, info = presence_key(a.kind), payload()
if #a.id > MAX_ID or #info > MAX_BYTES then return { 'full' } end
if info == '' then
  redis.call('HDEL', key, a.id)
elseif redis.call('HLEN', key) >= MAX_KNOWN and redis.call('HEXISTS', key, a.id) == 0 then
  return { 'full' }
else
  redis.call('HSET', key, a.id, info)
end
return { 'beaten' }
