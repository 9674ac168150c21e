-- create_job: {state, created_s, idempotency_key, max_jobs, max_spec_bytes}, payloads JobSpec, JobEvent
--   -> {created} | {already} | {removed} | {full, 'jobs' or 'bytes of specs', how many there are}
-- A repeat after a lost answer changes nothing. An id that a removal took between the reservation of its key and this call
-- is not given again: a consumer is about to remove the files of that id.
-- A submission that is refused leaves nothing, its reservation neither: refusals may be without end. What a resume changes of a
-- spec is small, and counts as its first length.
if redis.call('EXISTS', JOB) == 1 then return { 'already' } end
if redis.call('HEXISTS', REMOVED, JOB_ID) == 1 then return { 'removed' } end
local spec = payload()
local num_jobs, num_bytes = redis.call('ZCARD', JOBS), tonumber(redis.call('GET', SPEC_BYTES)) or 0
local too_many = a.max_jobs and num_jobs >= a.max_jobs and { 'full', 'jobs', num_jobs }
local too_large = a.max_spec_bytes and num_bytes + #spec > a.max_spec_bytes and { 'full', 'bytes of specs', num_bytes }
if too_many or too_large then
  drop_reservation(a.idempotency_key)
  return too_many or too_large
end
require_room({}, 1)
redis.call('SET', job_key('spec'), spec)
redis.call('INCRBY', SPEC_BYTES, #spec)
redis.call('HSET', JOB, 'state', a.state, 'reason', '', 'created_s', a.created_s, 'idempotency_key', a.idempotency_key,
  'spec_bytes', #spec)
redis.call('ZADD', JOBS, a.created_s, JOB_ID)
redis.call('SADD', ACTIVE, JOB_ID)
tell(payload())
wake_consumers('asked')
return { 'created' }
