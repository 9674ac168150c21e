-- remove_job: -> {removed} | {refused, state} | {held, ms left} | {unknown}
-- All of KEYS go, which are all keys of the job: who comes late finds no fence, and is refused as stale or fenced off.
local state = redis.call('HGET', JOB, 'state')
if not state then return { 'unknown' } end
if not ENDED[state] then return { 'refused', state } end
-- A trainer may be writing its last checkpoint.
local left = (tonumber(fence('lease_until')) or 0) - now_ms()
if left > 0 then return { 'held', math.ceil(left) } end
redis.call('UNLINK', unpack(KEYS))
return { 'removed' }
