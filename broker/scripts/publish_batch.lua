-- publish_batch: KEYS[9] ready;
--   {batch_id, iteration, policy_version, weights_digest, shape, digest, generator, attempt, max_bytes, num_rounds, stages, max_waiting, engine},
--   payload RolloutBatch; stages: what it passes before it is trained, or none; max_waiting: rows that may wait for columns;
--   engine: as of claim_prompt
--   -> {accepted} | {ended|stale|future|wrong_weights|wrong_engine|unexpected|duplicate|incomplete|oversize|closed, 1 if it is counted}
--    | {full, rows that wait for columns}
-- A repeat by the publisher whose answer was lost is accepted again, and writes nothing.
local READY = KEYS[9]
take_slots(10)
local fence = read_fence()
-- A refusal is answered at maxmemory too, where this script may not count: its caller counts it then.
local function refuse(reason)
  if not fence.epoch then return { reason, 1 } end -- of a job that was removed nothing comes back
  local counted = redis.pcall('HINCRBY', COUNTERS, 'rejected:' .. reason, 1)
  return { reason, type(counted) == 'number' and 1 or 0 }
end
local function rows_waiting()
  local names = {}
  for index = 0, NUM_SLOTS - 1 do names[#names + 1] = 'waiting:' .. index end
  local sum = 0
  for _, rows in ipairs(redis.call('HMGET', PROGRESS, unpack(names))) do sum = sum + (tonumber(rows) or 0) end
  return sum
end
-- Makes the batch wait for its columns: what reads no other stage's is free at once.
local function stage(slot, published, rollouts)
  local rows = num_rows(a)
  published.entry, published.shape, published.left, published.staged_ms = '', a.shape, 0, now_ms()
  for index, each in ipairs(a.stages) do
    local num_items = rows / item_rows(each, a)
    published.left = published.left + num_items
    if #each.after == 0 then set_free(slot, index - 1, a.batch_id, 0, num_items - 1) end
  end
  redis.call('HSET', slot.columns, 'b/' .. a.batch_id, rollouts)
  redis.call('HINCRBY', PROGRESS, 'waiting:' .. slot.index, rows)
  wake(READY)
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
local kept = engine_of_job()
if is_other_engine(kept, a.engine) then return refuse('wrong_engine') end
if batch.state == 'published' then
  if batch.digest == a.digest and batch.generator == a.generator and batch.attempt == a.attempt then return { 'accepted' } end
  return refuse('duplicate')
end
if batch.state ~= 'expected' then return refuse('unexpected') end
if batch.shape ~= a.shape then return refuse('incomplete') end
local rollouts = payload()
if #rollouts > a.max_bytes then return refuse('oversize') end
-- Stages push back: its generator holds it meanwhile. One batch always goes, however large.
local waiting = a.stages and rows_waiting() or 0
if waiting > 0 and waiting + num_rows(a) > a.max_waiting then return { 'full', waiting } end
local is_hedge = batch.hedger == a.generator
local claimed_ms = is_hedge and batch.hedged_ms or (batch.holder == a.generator and batch.claimed_ms)
local published = { state = 'published', digest = a.digest, generator = a.generator, attempt = a.attempt, version = batch.version }
if a.stages then
  stage(slot, published, rollouts)
else
  published.entry = redis.call('XADD', slot.rollouts, '*', 'batch', rollouts, 'batch_id', a.batch_id, 'digest', a.digest)
end
keep_engine(kept, a.engine)
write_batch(slot, a.batch_id, published)
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
