-- resume_job: KEYS[13] spec, [14] active;
--   ARGV job id, spec before, spec, horizons or '', length of the audit chain, event, n resumable states
--   -> {resumed} | {already} | {refused, state} | {changed}: what the caller looked at is no longer so
-- An iteration that stands open goes, with its dead batches: it is sampled again from its first batch.
local state, spec = redis.call('HGET', JOB, 'state'), redis.call('GET', KEYS[13])
if not state or not spec then return { 'refused', 'unknown' } end
if state == 'queued' and spec == ARGV[3] then return { 'already' } end
local allowed = false
for i = 7, #ARGV do allowed = allowed or ARGV[i] == state end
if not allowed then return { 'refused', state } end
if spec ~= ARGV[2] or redis.call('XLEN', AUDIT) ~= tonumber(ARGV[5]) then return { 'changed' } end
end_epoch()
close_iteration()
redis.call('SET', KEYS[13], ARGV[3])
redis.call('SADD', KEYS[14], ARGV[1])
redis.call('HSET', JOB, 'state', 'queued', 'reason', '', 'trainer_starts', 0)
if ARGV[4] ~= '' then redis.call('HSET', JOB, 'horizons', ARGV[4]) end
redis.call('HDEL', JOB, 'ended_s')
tell(ARGV[6])
return { 'resumed' }
