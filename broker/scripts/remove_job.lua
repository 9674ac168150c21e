-- remove_job: ARGV n final states -> {removed} | {refused, state} | {held, ms left} | {unknown}
-- All of KEYS go, which are all keys of the job: who comes late finds no fence, and is refused as stale or fenced off.
local state = redis.call('HGET', JOB, 'state')
if not state then return { 'unknown' } end
local is_final = false
for i = 1, #ARGV do is_final = is_final or ARGV[i] == state end
if not is_final then return { 'refused', state } end
-- A trainer may be writing its last checkpoint.
local left = (tonumber(fence('lease_until')) or 0) - now_ms()
if left > 0 then return { 'held', math.ceil(left) } end
redis.call('UNLINK', unpack(KEYS))
return { 'removed' }
