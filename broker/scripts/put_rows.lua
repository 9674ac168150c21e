-- put_rows: {stages, runs}; runs: of {stage, iteration, batch_id, of, items, inputs, digests}, items of a stage and a
--   batch; of: digest of the batch that the columns are made of; inputs: of each item, where its stage reads columns of others: the
--   digests of those that it is made of; digests: of each item's columns, where another stage reads them; payloads the packed columns of
--   each item
--   -> {put, n x (accepted | again | divergent | not_ready | settled)}
-- Content decides, not the lease: the first put of an item counts, of any worker, and a repeat writes nothing (I3).
-- not_ready: what it was made of is not what stands there; settled: its batch is dead or another one, its iteration or job over.
-- A run asks and writes all at once.
local fence, has_ended, is_woken = read_fence(), is_ended(), false
local function reads(stage, index)
  for _, before in ipairs(stage.after) do
    if before == index then return true end
  end
  return false
end
-- The digests that stand for the inputs of an item, by their names in `columns`.
local function input_names(stage, id, item, batch)
  local names = {}
  for _, before in ipairs(stage.after) do
    local first, last = overlap(stage, a.stages[before], batch, item)
    for other = first, last do names[#names + 1] = 'd/' .. member_of(before, id, other) end
  end
  return names
end
-- Which items of a run were made of the columns that stand there: a restart may have lost those, and others came.
local function have_inputs(slot, run, batch)
  local stage, names, expected, of, have = a.stages[run.stage], {}, {}, {}, {}
  for at, item in ipairs(run.items) do
    local of_item, told = input_names(stage, run.batch_id, item, batch), run.inputs[at] or {}
    have[at] = #of_item == #told
    for number = 1, have[at] and #told or 0 do
      names[#names + 1], expected[#expected + 1], of[#of + 1] = of_item[number], told[number], at
    end
  end
  for number, digest in ipairs(each_of('HMGET', slot.columns, names)) do
    if digest ~= expected[number] then have[of[number]] = false end
  end
  return have
end
-- How many items of other stages an item of this one is made of.
local function num_inputs(stage, batch)
  local num = 0
  for _, before in ipairs(stage.after) do
    local first, last = overlap(stage, a.stages[before], batch, 0)
    num = num + last - first + 1
  end
  return num
end
-- The items of a stage that have rows of these items of another one, each with how many of them it has.
local function readers(made, stage, batch, items)
  local order, parts = {}, {}
  for _, item in ipairs(items) do
    local first, last = overlap(made, stage, batch, item)
    for other = first, last do
      if not parts[other] then order[#order + 1] = other end
      parts[other] = (parts[other] or 0) + 1
    end
  end
  return order, parts
end
local function free_readers(slot, run, batch, items)
  local made = a.stages[run.stage]
  for number, stage in ipairs(a.stages) do
    if reads(stage, run.stage) then
      local needed, order, parts = num_inputs(stage, batch), readers(made, stage, batch, items)
      for _, item in ipairs(order) do
        local field = 'n/' .. member_of(number, run.batch_id, item)
        local there = needed == 1 and 1 or redis.call('HINCRBY', slot.columns, field, parts[item])
        if there == needed then
          if needed > 1 then redis.call('HDEL', slot.columns, field) end
          set_free(slot, number, run.batch_id, item, item)
          is_woken = true
        end
      end
    end
  end
end
-- The batch stays where it is, and the trainer reads it there beside its columns: written again, it would cross the file twice.
local function complete(slot, id, batch)
  batch.entry = redis.call('XADD', slot.rollouts, '*', 'batch_id', id, 'digest', batch.digest)
  redis.call('HINCRBY', PROGRESS, 'waiting:' .. slot.index, -num_rows(batch))
end
-- values: of each item that is accepted, false for the others.
local function write(slot, run, values, batch)
  local members, items, words = {}, {}, {}
  for at, item in ipairs(run.items) do
    if values[at] then
      local member = member_of(run.stage, run.batch_id, item)
      members[#members + 1], items[#items + 1] = member, item
      words[#words + 1], words[#words + 2] = 'c/' .. member, values[at]
      if run.digests[at] then words[#words + 1], words[#words + 2] = 'd/' .. member, run.digests[at] end
    end
  end
  if #items == 0 then return end
  call_with('HSET', slot.columns, words)
  call_with('HDEL', slot.columns, behind('l/', members))
  call_with('ZREM', slot.work, members)
  free_readers(slot, run, batch, items)
  count('stage_rows:' .. run.stage, #items * item_rows(a.stages[run.stage], batch))
  batch.left = batch.left - #items
  if batch.left == 0 then complete(slot, run.batch_id, batch) end
  write_batch(slot, run.batch_id, batch)
end
local function outcome_of(run, batch, stands, values, score, has_inputs)
  if has_ended or not batch or batch.digest ~= run.of then return 'settled' end
  if stands then return stands == values and 'again' or 'divergent' end
  if not score or not has_inputs then return 'not_ready' end
  return 'accepted'
end
local function put(run, out)
  require_number(run.stage, 1, #a.stages)
  -- Only a published batch of an open iteration is waited for.
  local slot = open_at(fence, run.iteration) and slot_of(run.iteration)
  local batch = slot and batch_of(slot, run.batch_id)
  if not batch or batch.state ~= 'published' or not batch.shape then slot, batch = nil, nil end
  local members, there, scores, have, made, taken = {}, {}, {}, {}, {}, {}
  if slot then
    for at, item in ipairs(run.items) do members[at] = member_of(run.stage, run.batch_id, item) end
    there = each_of('HMGET', slot.columns, behind('c/', members))
    scores = each_of('ZMSCORE', slot.work, members)
    have = have_inputs(slot, run, batch)
  end
  for at, item in ipairs(run.items) do
    local values = payload()
    local outcome = outcome_of(run, batch, there[at] or made[item], values, scores[at], have[at])
    taken[at] = outcome == 'accepted' and values
    made[item] = made[item] or taken[at] or nil
    out[#out + 1] = outcome
  end
  if slot then write(slot, run, taken, batch) end
end
local out = { 'put' }
for _, run in ipairs(a.runs) do put(run, out) end
if is_woken then wake('ready') end
return out
