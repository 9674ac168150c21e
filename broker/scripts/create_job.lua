-- create_job: KEYS[9] spec, [10] jobs, [11] active, [12] removed;
--   {job_id, state, created_s, idempotency_key}, payloads JobSpec, JobEvent -> {created} | {already} | {removed}
-- A repeat after a lost answer changes nothing. An id that a removal took between the reservation of its key and this call
-- is not given again: a consumer is about to remove the files of that id.
local SPEC, JOBS, ACTIVE, REMOVED = unpack(KEYS, 9)
if redis.call('EXISTS', JOB) == 1 then return { 'already' } end
if redis.call('HEXISTS', REMOVED, a.job_id) == 1 then return { 'removed' } end
redis.call('SET', SPEC, payload())
redis.call('HSET', JOB, 'state', a.state, 'reason', '', 'created_s', a.created_s, 'idempotency_key', a.idempotency_key)
redis.call('ZADD', JOBS, a.created_s, a.job_id)
redis.call('SADD', ACTIVE, a.job_id)
tell(payload())
return { 'created' }
