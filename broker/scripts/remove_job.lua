-- remove_job: KEYS[13] jobs, [14] active, [15] idempotency key of the job, [16] and on: its other keys; ARGV job id
--   -> {removed} | {refused, state} | {held, ms left} | {unknown}
-- All keys of the job go: who comes late finds no fence, and is refused as stale or fenced off. So does what is left of
-- a job without a state: a late count brings its hash back.
local state = redis.call('HGET', JOB, 'state')
if state and not ENDED[state] then return { 'refused', state } end
-- A trainer may be writing its last checkpoint.
local left = (tonumber(fence('lease_until')) or 0) - now_ms()
if left > 0 then return { 'held', math.ceil(left) } end
redis.call('ZREM', KEYS[13], ARGV[1])
redis.call('SREM', KEYS[14], ARGV[1])
-- A repeat of its submission must not bring the same id back, over its old run folder; another job's key stays.
local reserved = redis.call('GET', KEYS[15])
if reserved and string.sub(reserved, 1, #ARGV[1] + 1) == ARGV[1] .. ' ' then redis.call('DEL', KEYS[15]) end
redis.call('UNLINK', unpack(KEYS, 1, 12))
redis.call('UNLINK', unpack(KEYS, 16))
return { state and 'removed' or 'unknown' }
