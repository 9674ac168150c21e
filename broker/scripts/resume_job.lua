-- resume_job: {allowed, num_records}; allowed: state that can be resumed -> true;
--   num_records: length of the audit chain; payloads the spec before, the spec, horizons or '', JobEvent
--   -> {resumed} | {already} | {refused, state} | {changed}: what the caller looked at is no longer so
-- Where nothing is committed nothing is left of what was sampled, so another kind of engine may begin.
-- Iterations that stand open go, with their dead batches: they are sampled again from the first batch.
local SPEC = job_key('spec')
local before, after, horizons, event = payload(), payload(), payload(), payload()
local state, spec = redis.call('HGET', JOB, 'state'), redis.call('GET', SPEC)
if not state or not spec then return { 'refused', 'unknown' } end
if state == 'queued' and spec == after then return { 'already' } end
if not a.allowed[state] then return { 'refused', state } end
if spec ~= before or redis.call('XLEN', AUDIT) ~= a.num_records then return { 'changed' } end
end_epoch()
end_window()
if read_fence().committed < 0 then redis.call('HDEL', PROGRESS, 'engine') end
redis.call('SET', SPEC, after)
redis.call('SADD', ACTIVE, JOB_ID)
redis.call('HSET', JOB, 'state', 'queued', 'reason', '', 'trainer_starts', 0)
if horizons ~= '' then redis.call('HSET', JOB, 'horizons', horizons) end
redis.call('HDEL', JOB, 'ended_s')
tell(event)
wake_consumers('asked')
return { 'resumed' }
