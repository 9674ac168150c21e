-- create_job: KEYS[9] spec, [10] jobs, [11] active; {job_id, state, created_s, idempotency_key}, payloads JobSpec, JobEvent
--   -> {created} | {already}
-- A repeat after a lost answer changes nothing.
local SPEC, JOBS, ACTIVE = unpack(KEYS, 9)
if redis.call('EXISTS', JOB) == 1 then return { 'already' } end
redis.call('SET', SPEC, payload())
redis.call('HSET', JOB, 'state', a.state, 'reason', '', 'created_s', a.created_s, 'idempotency_key', a.idempotency_key)
redis.call('ZADD', JOBS, a.created_s, a.job_id)
redis.call('SADD', ACTIVE, a.job_id)
tell(payload())
return { 'created' }
