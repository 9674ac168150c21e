-- create_job: KEYS[9] spec, [10] jobs, [11] active, [12] removed, [13] spec bytes, [14] idempotency key of the job;
--   {job_id, state, created_s, idempotency_key, max_jobs, max_spec_bytes}, payloads JobSpec, JobEvent
--   -> {created} | {already} | {removed} | {full, 'jobs' or 'bytes of specs', how many there are}
-- A repeat after a lost answer changes nothing. An id that a removal took between the reservation of its key and this call
-- is not given again: a consumer is about to remove the files of that id.
-- A submission that is refused leaves nothing, its reservation neither: refusals may be without end. What a resume changes of a
-- spec is small, and counts as its first length.
local SPEC, JOBS, ACTIVE, REMOVED, BYTES, IDEMPOTENCY = unpack(KEYS, 9)
if redis.call('EXISTS', JOB) == 1 then return { 'already' } end
if redis.call('HEXISTS', REMOVED, a.job_id) == 1 then return { 'removed' } end
local spec = payload()
local num_jobs, num_bytes = redis.call('ZCARD', JOBS), tonumber(redis.call('GET', BYTES)) or 0
local too_many = a.max_jobs and num_jobs >= a.max_jobs and { 'full', 'jobs', num_jobs }
local too_large = a.max_spec_bytes and num_bytes + #spec > a.max_spec_bytes and { 'full', 'bytes of specs', num_bytes }
if too_many or too_large then
  local reserved = redis.call('GET', IDEMPOTENCY)
  if reserved and string.sub(reserved, 1, #a.job_id + 1) == a.job_id .. ' ' then redis.call('DEL', IDEMPOTENCY) end
  return too_many or too_large
end
redis.call('SET', SPEC, spec)
redis.call('INCRBY', BYTES, #spec)
redis.call('HSET', JOB, 'state', a.state, 'reason', '', 'created_s', a.created_s, 'idempotency_key', a.idempotency_key,
  'spec_bytes', #spec)
redis.call('ZADD', JOBS, a.created_s, a.job_id)
redis.call('SADD', ACTIVE, a.job_id)
tell(payload())
return { 'created' }
