-- put_rows: KEYS[9] ready; {stages, items}; items: of {stage, iteration, batch_id, item, of, inputs, digest}; of: digest of the
--   batch that the columns are made of; inputs: digests of what other stages made of its rows; digest: of the columns; payloads
--   the packed columns of each
--   -> {put, n x (accepted | again | divergent | not_ready | settled)}
-- Content decides, not the lease: the first put of an item counts, of any worker, and a repeat writes nothing (I3).
-- not_ready: what it was made of is not what stands there; settled: its batch is dead or another one, its iteration or job over.
local READY = KEYS[9]
take_slots(10)
local fence, has_ended, is_woken = read_fence(), is_ended(), false
local function reads(stage, index)
  for _, before in ipairs(stage.after) do
    if before == index then return true end
  end
  return false
end
local function is_read(index)
  for _, stage in ipairs(a.stages) do
    if reads(stage, index) then return true end
  end
  return false
end
-- Whether the item was made of the columns that stand there: a restart may have lost those, and others came.
local function has_inputs(slot, put, batch)
  local names, stage = {}, a.stages[put.stage + 1]
  for _, before in ipairs(stage.after) do
    local first, last = overlap(stage, a.stages[before + 1], batch, put.item)
    for other = first, last do names[#names + 1] = 'd/' .. member_of(before, put.batch_id, other) end
  end
  if #names ~= #put.inputs then return false end
  for at, name in ipairs(names) do
    if redis.call('HGET', slot.columns, name) ~= put.inputs[at] then return false end
  end
  return true
end
-- How many items of other stages an item of this one is made of.
local function num_inputs(stage, batch)
  local num = 0
  for _, before in ipairs(stage.after) do
    local first, last = overlap(stage, a.stages[before + 1], batch, 0)
    num = num + last - first + 1
  end
  return num
end
local function free_readers(slot, put, batch)
  local made = a.stages[put.stage + 1]
  for index, stage in ipairs(a.stages) do
    if reads(stage, put.stage) then
      local needed, first, last = num_inputs(stage, batch), overlap(made, stage, batch, put.item)
      for item = first, last do
        local field = 'n/' .. member_of(index - 1, put.batch_id, item)
        local there = needed == 1 and 1 or redis.call('HINCRBY', slot.columns, field, 1)
        if there == needed then
          if needed > 1 then redis.call('HDEL', slot.columns, field) end
          set_free(slot, index - 1, put.batch_id, item, item)
          is_woken = true
        end
      end
    end
  end
end
local function complete(slot, id, batch)
  local rollouts = redis.call('HGET', slot.columns, 'b/' .. id)
  batch.entry = redis.call('XADD', slot.rollouts, '*', 'batch', rollouts, 'batch_id', id, 'digest', batch.digest)
  redis.call('HDEL', slot.columns, 'b/' .. id)
  redis.call('HINCRBY', PROGRESS, 'waiting:' .. slot.index, -num_rows(batch))
end
local function put_item(put, values)
  local slot, batch = staged_item(fence, put)
  if has_ended or not slot or batch.digest ~= put.of then return 'settled' end
  local member = member_of(put.stage, put.batch_id, put.item)
  local stands = redis.call('HGET', slot.columns, 'c/' .. member)
  if stands then return stands == values and 'again' or 'divergent' end
  if not redis.call('ZSCORE', slot.work, member) or not has_inputs(slot, put, batch) then return 'not_ready' end
  redis.call('HSET', slot.columns, 'c/' .. member, values)
  redis.call('HDEL', slot.columns, 'l/' .. member)
  redis.call('ZREM', slot.work, member)
  if is_read(put.stage) then
    redis.call('HSET', slot.columns, 'd/' .. member, put.digest)
    free_readers(slot, put, batch)
  end
  count('stage_rows:' .. put.stage, item_rows(a.stages[put.stage + 1], batch))
  batch.left = batch.left - 1
  if batch.left == 0 then complete(slot, put.batch_id, batch) end
  write_batch(slot, put.batch_id, batch)
  return 'accepted'
end
local out = { 'put' }
for _, put in ipairs(a.items) do out[#out + 1] = put_item(put, payload()) end
if is_woken then wake(READY) end
return out
