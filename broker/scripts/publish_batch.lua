-- publish_batch: {batch_id, iteration, policy_version, weights_digest, shape, digest, generator, attempt, max_bytes, num_rounds, stages, max_waiting, engine},
--   payload RolloutBatch; stages: what it passes before it is trained, or none; max_waiting: rows that may wait for columns;
--   engine: as of claim_prompt
--   -> {accepted} | {ended|stale|future|wrong_weights|wrong_engine|unexpected|duplicate|incomplete|oversize|closed}
--    | {full, rows that wait for columns} | {no_room, bytes that are missing} | OOM, at maxmemory
-- A repeat by the publisher whose answer was lost is accepted again, and writes nothing.
-- Memory goes by age: what the oldest iteration needs for its commit, which alone frees any, is kept from the younger ones.
require_number(a.num_rounds, 1)
local fence = read_fence()
local function refuse(reason)
  if fence.epoch then count('rejected:' .. reason) end -- of a job that was removed nothing comes back
  return { reason }
end
local function rows_waiting()
  local sum = 0
  for index = 0, num_slots() - 1 do sum = sum + (tonumber(redis.call('HGET', PROGRESS, 'waiting:' .. index)) or 0) end
  return sum
end
-- What the oldest iteration lacks: its batches, as large as any yet, with columns as large where there are any, one more on its
-- way, and a version.
local function needed_by_oldest(largest)
  local oldest = fence.window[1]
  local settled = progress(slot_of(oldest.iteration))
  local left = math.max(0, oldest.expected - settled.published - settled.dead)
  local of_version = tonumber(redis.call('HGET', FENCE, 'version_bytes')) or 0
  return left * largest * (1 + (a.stages and #a.stages or 0)) + largest + of_version
end
-- Makes the batch wait for its columns: what reads no other stage's is free at once.
local function stage(slot, published, rollouts)
  local rows = num_rows(a)
  published.entry, published.shape, published.left, published.staged_ms = '', a.shape, 0, now_ms()
  for number, each in ipairs(a.stages) do
    local num_items = rows / item_rows(each, a)
    published.left = published.left + num_items
    if #each.after == 0 then set_free(slot, number, a.batch_id, 0, num_items - 1) end
  end
  redis.call('HSET', slot.columns, 'b/' .. a.batch_id, rollouts)
  redis.call('HINCRBY', PROGRESS, 'waiting:' .. slot.index, rows)
  wake('ready')
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
local of_slot = 'published:' .. slot.index
local kept, known, recent_ms, num_published = unpack(redis.call('HMGET', PROGRESS, 'engine', 'largest', 'recent_ms', of_slot))
if is_other_engine(kept or nil, a.engine) then return refuse('wrong_engine') end
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
local largest = math.max(tonumber(known) or 0, #rollouts)
if open.iteration > fence.window[1].iteration then
  local used, limit = memory()
  local missing = used + #rollouts + needed_by_oldest(largest) - limit
  if limit > 0 and missing > 0 then return { 'no_room', math.ceil(missing) } end
else
  -- Where the oldest iteration's commit frees more than its own batches, they go past the limit. What of them that is was kept free
  -- when the younger ones came; where an estimate was short, or the limit was lowered, it is little.
  require_room(fence.window, 2)
end
local last = claim_of(slot, member_of(0, a.batch_id, 0))
local is_hedge = last.hedger == a.generator
local claimed_ms = is_hedge and last.hedged_ms or (last.worker == a.generator and last.claimed_ms)
local published = { state = 'published', digest = a.digest, generator = a.generator, attempt = a.attempt, version = batch.version }
if a.stages then
  stage(slot, published, rollouts)
else
  published.entry = redis.call('XADD', slot.rollouts, '*', 'batch', rollouts, 'batch_id', a.batch_id, 'digest', a.digest)
end
keep_engine(kept, a.engine)
local recent = unpacked(recent_ms) or {}
if claimed_ms then
  table.insert(recent, 1, math.floor(math.max(0, now_ms() - claimed_ms) / a.num_rounds))
  recent[RECENT + 1] = nil
end
redis.call('HSET', PROGRESS, of_slot, (tonumber(num_published) or 0) + 1, 'largest', whole(largest), 'recent_ms', cmsgpack.pack(recent))
write_batch(slot, a.batch_id, published)
drop_prompt(slot, a.batch_id)
if is_hedge then count('hedges_won') end
count('accepted')
count('accepted_bytes', #rollouts)
return { 'accepted' }
