-- remove_job: KEYS[9] jobs, [10] active, [11] idempotency key of the job, [12] and on: its other keys, those of every slot
--   that a job can have; {job_id}
--   -> {removed} | {refused, state} | {held, ms left} | {unknown}
-- All keys of the job go: a call that comes late finds no fence, and is refused as stale or fenced off. So does what is left
-- of a job without a state.
local JOBS, ACTIVE, IDEMPOTENCY = unpack(KEYS, 9, 11)
local state = redis.call('HGET', JOB, 'state')
if state and not ENDED[state] then return { 'refused', state } end
-- A trainer may be writing its last checkpoint.
local left = (tonumber(redis.call('HGET', FENCE, 'lease_until')) or 0) - now_ms()
if left > 0 then return { 'held', math.ceil(left) } end
redis.call('ZREM', JOBS, a.job_id)
redis.call('SREM', ACTIVE, a.job_id)
-- A repeat of its submission must not bring the same id back, over its old run folder; another job's key stays.
local reserved = redis.call('GET', IDEMPOTENCY)
if reserved and string.sub(reserved, 1, #a.job_id + 1) == a.job_id .. ' ' then redis.call('DEL', IDEMPOTENCY) end
redis.call('UNLINK', unpack(KEYS, 1, 8))
redis.call('UNLINK', unpack(KEYS, 12))
return { state and 'removed' or 'unknown' }
