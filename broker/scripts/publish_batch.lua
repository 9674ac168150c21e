-- publish_batch: {batch_id, iteration, policy_version, weights_digest, shape, digest, generator, attempt, max_bytes, num_rounds},
--   payload RolloutBatch
--   -> {accepted} | {ended|stale|future|wrong_weights|unexpected|duplicate|incomplete|oversize|closed, 1 if it is counted}
-- A repeat by the publisher whose answer was lost is accepted again, and writes nothing.
take_slots(9)
local fence = read_fence()
-- A refusal is answered at maxmemory too, where this script may not count: its caller counts it then.
local function refuse(reason)
  if not fence.epoch then return { reason, 1 } end -- of a job that was removed nothing comes back
  local counted = redis.pcall('HINCRBY', COUNTERS, 'rejected:' .. reason, 1)
  return { reason, type(counted) == 'number' and 1 or 0 }
end
if is_ended() then return refuse('ended') end
local open = open_at(fence, a.iteration)
if not open then
  if a.iteration > newest_iteration(fence) then return refuse('future') end
  return refuse(#fence.window == 0 and a.iteration == fence.committed and 'closed' or 'stale')
end
local slot = slot_of(a.iteration)
local batch = batch_of(slot, a.batch_id)
local oldest, newest = range_of(open, batch)
if a.policy_version < oldest then return refuse('stale') end
if a.policy_version > newest then return refuse('future') end
if a.weights_digest ~= digest_of(fence, a.policy_version) then return refuse('wrong_weights') end
if batch.state == 'published' then
  if batch.digest == a.digest and batch.generator == a.generator and batch.attempt == a.attempt then return { 'accepted' } end
  return refuse('duplicate')
end
if batch.state ~= 'expected' then return refuse('unexpected') end
if batch.shape ~= a.shape then return refuse('incomplete') end
local rollouts = payload()
if #rollouts > a.max_bytes then return refuse('oversize') end
local is_hedge = batch.hedger == a.generator
local claimed_ms = is_hedge and batch.hedged_ms or (batch.holder == a.generator and batch.claimed_ms)
local entry = redis.call('XADD', slot.rollouts, '*', 'batch', rollouts, 'batch_id', a.batch_id, 'digest', a.digest)
write_batch(slot, a.batch_id, { state = 'published', entry = entry, digest = a.digest, generator = a.generator,
  attempt = a.attempt, version = batch.version })
drop_prompt(slot, batch.entry)
redis.call('ZREM', slot.claims, a.batch_id)
redis.call('HINCRBY', PROGRESS, 'published:' .. slot.index, 1)
if claimed_ms then
  local recent_ms = recent_times()
  table.insert(recent_ms, 1, math.floor(math.max(0, now_ms() - claimed_ms) / a.num_rounds))
  recent_ms[RECENT + 1] = nil
  redis.call('HSET', PROGRESS, 'recent_ms', cmsgpack.pack(recent_ms))
end
if is_hedge then count('hedges_won') end
count('accepted')
count('accepted_bytes', #rollouts)
return { 'accepted' }
