-- publish_batch: {batch_id, iteration, policy_version, weights_digest, shape, digest, generator, attempt, max_bytes, num_rounds},
--   payload RolloutBatch
--   -> {accepted} | {ended|stale|future|wrong_weights|unexpected|duplicate|incomplete|oversize|closed, 1 if it is counted}
-- A repeat by the publisher whose answer was lost is accepted again, and writes nothing.
local fence = read_fence()
-- A refusal is answered at maxmemory too, where this script may not count: its caller counts it then.
local function refuse(reason)
  if not fence.epoch then return { reason, 1 } end -- of a job that was removed nothing comes back
  local counted = redis.pcall('HINCRBY', COUNTERS, 'rejected:' .. reason, 1)
  return { reason, type(counted) == 'number' and 1 or 0 }
end
if is_ended() then return refuse('ended') end
if a.iteration < fence.iteration then return refuse('stale') end
if a.iteration > fence.iteration then return refuse('future') end
if not fence.open then return refuse('closed') end
if a.policy_version < fence.open.version then return refuse('stale') end
if a.policy_version > fence.open.version then return refuse('future') end
if a.weights_digest ~= fence.open.digest then return refuse('wrong_weights') end
local batch = batch_of(a.batch_id)
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
local entry = redis.call('XADD', ROLLOUTS, '*', 'batch', rollouts, 'batch_id', a.batch_id, 'digest', a.digest)
write_batch(a.batch_id, { state = 'published', entry = entry, digest = a.digest, generator = a.generator, attempt = a.attempt })
drop_prompt(batch.entry)
redis.call('ZREM', CLAIMS, a.batch_id)
local so_far = progress()
if claimed_ms then
  table.insert(so_far.recent_ms, 1, math.floor(math.max(0, now_ms() - claimed_ms) / a.num_rounds))
  so_far.recent_ms[RECENT + 1] = nil
end
redis.call('HSET', PROGRESS, 'published', so_far.published + 1, 'recent_ms', cmsgpack.pack(so_far.recent_ms))
if is_hedge then count('hedges_won') end
count('accepted')
count('accepted_bytes', #rollouts)
return { 'accepted' }
