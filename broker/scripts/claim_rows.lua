-- claim_rows: KEYS[9] ready; {worker, stage, name, stages, lease_ms, max_attempts, max_rows, held}
--   stage, name: its index and its name; held: batch id -> digest, of batches that the worker still has
--   -> {claimed, packed {items, fields}, n x the value of a field}; items: of {iteration, batch_id, item, attempt, digest: of its
--      batch}; fields: of `columns`, each once: batches that the worker lacks, and what other stages made of the items' rows
--    | {none, ms until a lease ends, or -1, the last entry id of ready}
-- The oldest iteration comes first, and in it an expired lease; then what is free. The first item goes out whatever its size.
local READY = KEYS[9]
take_slots(10)
local fence = read_fence()
local now, stage = now_ms(), a.stages[a.stage + 1]
local free, end_of_band = a.stage * BAND, (a.stage + 1) * BAND - 1
local MAX_ITEMS, MAX_BYTES = 256, 2 ^ 25
local items, fields, values, is_known, rows_taken, bytes_taken = {}, {}, {}, {}, 0, 0
local function range(slot, from, to, number)
  return redis.call('ZRANGE', slot.work, whole(from), whole(to), 'BYSCORE', 'LIMIT', '0', number)
end
-- One that ends later than any lease that was taken: a clock has stepped back.
local function expired(slot)
  return range(slot, free + 1, free + now, 1)[1] or range(slot, free + now + 2 * a.lease_ms + 1, end_of_band, 1)[1]
end
local function add(slot, field)
  if is_known[field] then return end
  is_known[field] = true
  local value = redis.call('HGET', slot.columns, field)
  fields[#fields + 1], values[#values + 1] = field, value
  bytes_taken = bytes_taken + #value
end
local function has_room(rows)
  return #items == 0 or (rows_taken + rows <= a.max_rows and #items < MAX_ITEMS and bytes_taken < MAX_BYTES)
end
-- False where there is no room for it.
local function take(slot, iteration, member, was_held)
  local id, item = string.match(member, '^%d+/(.*)/(%d+)$')
  item = tonumber(item)
  local batch = batch_of(slot, id)
  local rows, attempt = item_rows(stage, batch), claim_of(slot, member).attempt + 1
  if attempt > a.max_attempts then
    bury_staged(slot, id, batch, a.stages, 'stage ' .. a.name .. ': its workers died ' .. (attempt - 1) .. ' times')
    return true
  end
  if not has_room(rows) then return false end
  if was_held then count('stage_reclaimed:' .. a.stage) end
  redis.call('HSET', slot.columns, 'l/' .. member, cmsgpack.pack({ worker = a.worker, attempt = attempt, claimed_ms = now }))
  redis.call('ZADD', slot.work, whole(free + now + a.lease_ms), member)
  items[#items + 1] = { iteration = iteration, batch_id = id, item = item, attempt = attempt, digest = batch.digest }
  rows_taken = rows_taken + rows
  if a.held[id] ~= batch.digest then add(slot, 'b/' .. id) end
  for _, before in ipairs(stage.after) do
    local first, last = overlap(stage, a.stages[before + 1], batch, item)
    for other = first, last do add(slot, 'c/' .. member_of(before, id, other)) end
  end
  return true
end
local function take_from(slot, iteration)
  local member = expired(slot)
  while member do
    if not take(slot, iteration, member, true) then return end
    member = expired(slot)
  end
  for _, each in ipairs(range(slot, free, free, math.min(a.max_rows, MAX_ITEMS))) do
    if not take(slot, iteration, each, false) then return end
  end
end
local function nothing()
  local due = -1
  for _, open in ipairs(fence.window) do
    local slot = slot_of(open.iteration)
    local first = redis.call('ZRANGE', slot.work, whole(free + 1), whole(end_of_band), 'BYSCORE', 'LIMIT', '0', '1', 'WITHSCORES')
    local left = first[2] and math.max(0, tonumber(first[2]) - free - now)
    if left and (due < 0 or left < due) then due = left end
  end
  return { 'none', due, last_id(READY) }
end
if is_ended() then return nothing() end
for _, open in ipairs(fence.window) do take_from(slot_of(open.iteration), open.iteration) end
if #items == 0 then return nothing() end
table.insert(values, 1, 'claimed')
table.insert(values, 2, cmsgpack.pack({ items = items, fields = fields }))
return values
