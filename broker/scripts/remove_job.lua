-- remove_job: KEYS[9] jobs, [10] active, [11] removed, [12] idempotency key of the job, [13] spec bytes, [14] and on: its other
--   keys, those of every slot that a job can have; {job_id, as_seen}, payload Removal; as_seen: {ended_s, num_records} of a removal that goes by
--   what its caller has read of the job, or none
--   -> {removed} | {refused, state} | {held, ms left} | {changed} | {unknown}
-- All keys of the job go: a call that comes late finds no fence, and is refused as stale or fenced off. So does what is left
-- of a job without a state. What becomes of its files is noted in the same step: no death in between forgets them.
local JOBS, ACTIVE, REMOVED, IDEMPOTENCY, BYTES = unpack(KEYS, 9, 13)
local state, ended_s, spec_bytes = unpack(redis.call('HMGET', JOB, 'state', 'ended_s', 'spec_bytes'))
if state and not ENDED[state] then return { 'refused', state } end
-- A trainer may be writing its last checkpoint.
local left = (tonumber(redis.call('HGET', FENCE, 'lease_until')) or 0) - now_ms()
if left > 0 then return { 'held', math.ceil(left) } end
local seen = a.as_seen
if seen and (not state or seen.ended_s ~= ended_s or seen.num_records ~= redis.call('XLEN', AUDIT)) then return { 'changed' } end
if state then redis.call('HSET', REMOVED, a.job_id, payload()) end
redis.call('ZREM', JOBS, a.job_id)
redis.call('SREM', ACTIVE, a.job_id)
-- A repeat of its submission must not bring the same id back, over its old run folder; another job's key stays.
local reserved = redis.call('GET', IDEMPOTENCY)
if reserved and string.sub(reserved, 1, #a.job_id + 1) == a.job_id .. ' ' then redis.call('DEL', IDEMPOTENCY) end
redis.call('UNLINK', unpack(KEYS, 1, 8))
if spec_bytes then redis.call('DECRBY', BYTES, spec_bytes) end
redis.call('UNLINK', unpack(KEYS, 14))
return { state and 'removed' or 'unknown' }
