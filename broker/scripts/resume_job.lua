-- resume_job: ARGV spec before, spec, horizons or '', length of the audit chain, event, n resumable states
--   -> {resumed} | {already} | {refused, state} | {changed}: what the caller looked at is no longer so
-- The spec's key is KEYS[12]. The open iteration goes, with its dead batches: it is sampled again from its first batch.
local state, spec = redis.call('HGET', JOB, 'state'), redis.call('GET', KEYS[12])
if not state or not spec then return { 'refused', 'unknown' } end
if state == 'queued' and spec == ARGV[2] then return { 'already' } end
local allowed = false
for i = 6, #ARGV do allowed = allowed or ARGV[i] == state end
if not allowed then return { 'refused', state } end
if spec ~= ARGV[1] or redis.call('XLEN', AUDIT) ~= tonumber(ARGV[4]) then return { 'changed' } end
local epoch = tonumber(fence('epoch'))
if epoch then
  -- A trainer that slept through the job's end may hold the newest epoch still, or one that a restart has forgotten.
  redis.call('HSET', FENCE, 'epoch', string.format('%.0f', math.max(epoch + 1, now_ms())), 'owner', '', 'lease_until', '0')
end
if fence('state') == 'open' then
  clear_iteration()
  redis.call('HSET', FENCE, 'state', 'closed', 'iteration', tonumber(fence('committed')) or -1)
end
redis.call('SET', KEYS[12], ARGV[2])
redis.call('HSET', JOB, 'state', 'queued', 'reason', '', 'trainer_starts', 0)
if ARGV[3] ~= '' then redis.call('HSET', JOB, 'horizons', ARGV[3]) end
redis.call('HDEL', JOB, 'ended_s')
tell(ARGV[5])
return { 'resumed' }
