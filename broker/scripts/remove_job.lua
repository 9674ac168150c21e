-- remove_job: {idempotency_key, as_seen}, payload Removal; idempotency_key: of the job's submission, or '';
--   as_seen: {ended_s, num_records} of a removal that goes by
--   what its caller has read of the job, or none
--   -> {removed} | {refused, state} | {held, ms left} | {changed} | {unknown}
-- All keys of the job go: a call that comes late finds no fence, and is refused as stale or fenced off. So does what is left
-- of a job without a state. What becomes of its files is noted in the same step: no death in between forgets them.
local state, ended_s, spec_bytes = unpack(redis.call('HMGET', JOB, 'state', 'ended_s', 'spec_bytes'))
if state and not ENDED[state] then return { 'refused', state } end
-- A trainer may be writing its last checkpoint.
local left = (tonumber(redis.call('HGET', FENCE, 'lease_until')) or 0) - now_ms()
if left > 0 then return { 'held', math.ceil(left) } end
local seen = a.as_seen
if seen and (not state or seen.ended_s ~= ended_s or seen.num_records ~= redis.call('XLEN', AUDIT)) then return { 'changed' } end
if state then redis.call('HSET', REMOVED, JOB_ID, payload()) end
redis.call('ZREM', JOBS, JOB_ID)
redis.call('SREM', ACTIVE, JOB_ID)
-- A repeat of its submission must not bring the same id back, over its old run folder; another job's key stays.
drop_reservation(a.idempotency_key)
if tonumber(spec_bytes) then redis.call('DECRBY', SPEC_BYTES, whole(tonumber(spec_bytes))) end
local names = {}
for _, name in ipairs({ 'fence', 'weights', 'audit', 'job', 'events', 'spec', 'chunks', 'shards', 'starting', 'dispatched', 'ready', 'files' }) do
  names[#names + 1] = job_key(name)
end
for _, name in ipairs({ 'counters', 'dead', 'progress', 'buried', 'spans', 'claimers', 'hosts' }) do names[#names + 1] = sealed_key(name) end
for index = 0, num_slots() - 1 do
  local slot = slot_at(index)
  for _, name in ipairs(SLOT_NAMES) do names[#names + 1] = slot[name] end
end
redis.call('UNLINK', unpack(names))
wake_consumers('removed')
return { state and 'removed' or 'unknown' }
