-- claim_rows: {worker, heard, stage, name, stages, lease_ms, max_attempts, max_rows, held}
--   heard: the number of the newest claim of this stage that the worker knows of, 0 before the first;
--   stage, name: its number, from 1, and its name; held: batch id -> digest, of batches that the worker still has
--   -> {claimed, packed {claim, found, fields}, n x the value of a field}; claim: its number; found: of {iteration, batch_id, digest, items: of {item, attempt}};
--      fields: of `columns`, each once: batches that the worker lacks, and what other stages made of the items' rows.
--      A large batch is not among them: the worker reads it where it stands, since here it would be copied three times
--    | {none, ms until a lease ends, or -1, the last entry id of ready}
-- The oldest iteration comes first, and in it an expired lease; then what is free. The first item goes out whatever its size.
require_number(a.lease_ms, 1)
require_number(a.max_rows, 1)
require_number(a.stage, 1, #a.stages)
require_number(a.heard, 0, MAX_CLAIM)
local fence = read_fence()
local now, stage = now_ms(), a.stages[a.stage]
local MAX_ITEMS, MAX_BYTES, LARGE_BYTES = 256, 2 ^ 25, 2 ^ 18
local found, fields, values, is_known, batches, packed = {}, {}, {}, {}, {}, {}
local items_taken, rows_taken, bytes_taken, is_full = 0, 0, 0, false
local leased, claimed, lease_end = {}, {}, score_of(a.stage, now + a.lease_ms)
local who, claim = whole(a.stage) .. '/' .. a.worker, nil
local function known_batch(slot, id)
  batches[id] = batches[id] or batch_of(slot, id)
  return batches[id]
end
-- Answers fields of `columns`, each once.
local function add(slot, names)
  for at, value in ipairs(each_of('HMGET', slot.columns, names)) do
    fields[#fields + 1], values[#values + 1] = names[at], value
    bytes_taken = bytes_taken + #value
  end
end
local function add_batch(slot, id, batch)
  local field = 'b/' .. id
  if is_known[field] or a.held[id] == batch.digest then return end
  is_known[field] = true
  local size = redis.call('HSTRLEN', slot.columns, field)
  if size > LARGE_BYTES then bytes_taken = bytes_taken + size else add(slot, { field }) end
end
local function add_inputs(slot, id, batch, item)
  local names = {}
  for _, before in ipairs(stage.after) do
    local first, last = overlap(stage, a.stages[before], batch, item)
    for other = first, last do
      local field = 'c/' .. member_of(before, id, other)
      if not is_known[field] then names[#names + 1], is_known[field] = field, true end
    end
  end
  add(slot, names)
end
local function has_room(rows)
  return items_taken == 0 or (rows_taken + rows <= a.max_rows and items_taken < MAX_ITEMS and bytes_taken < MAX_BYTES)
end
local function write(slot)
  call_with('HSET', slot.columns, claimed)
  call_with('ZADD', slot.work, leased)
  claimed, leased = {}, {}
end
local function lease_out(member, attempt)
  claim = claim or new_claim()
  packed[attempt] = packed[attempt]
    or cmsgpack.pack({ worker = a.worker, attempt = attempt, claim = claim, claimed_ms = now, lease_ms = a.lease_ms })
  claimed[#claimed + 1], claimed[#claimed + 2] = 'l/' .. member, packed[attempt]
  leased[#leased + 1], leased[#leased + 2] = lease_end, member
end
-- Takes or buries an item, or says that there is no room for it.
local function take(slot, iteration, member, attempt)
  local id, item = string.match(member, '^%d+/(.*)/(%d+)$')
  local batch = known_batch(slot, id)
  -- Another item of it was one attempt too many, or it is of none: left there, it would be found again without end.
  if batch.state ~= 'published' then
    redis.call('ZREM', slot.work, member)
    return
  end
  if attempt > a.max_attempts then
    write(slot)
    local reason = 'stage ' .. a.name .. ': its workers died ' .. (attempt - 1) .. ' times'
    bury_staged(slot, id, batch, a.stages, reason, attempt - 1)
    batches[id] = {}
    return
  end
  local rows = item_rows(stage, batch)
  is_full = not has_room(rows)
  if is_full then return end
  lease_out(member, attempt)
  item = tonumber(item)
  local last = found[#found]
  if not last or last.batch_id ~= id then
    last = { iteration = iteration, batch_id = id, digest = batch.digest, items = {} }
    found[#found + 1] = last
  end
  last.items[#last.items + 1] = { item, attempt }
  items_taken, rows_taken = items_taken + 1, rows_taken + rows
  add_batch(slot, id, batch)
  add_inputs(slot, id, batch, item)
end
-- The last claim of each item.
local function claims_of(slot, members)
  local claims = {}
  for at, text in ipairs(each_of('HMGET', slot.columns, behind('l/', members))) do
    claims[at] = text and unpacked(text) or { attempt = 0 }
  end
  return claims
end
local function take_all(slot, iteration, members)
  local before = items_taken
  for at, claim in ipairs(claims_of(slot, members)) do
    if not is_full then take(slot, iteration, members[at], claim.attempt + 1) end
  end
  write(slot)
  is_full = is_full or not has_room(1)
  return items_taken - before
end
-- The items of the claim that this worker has not heard of, those that stand under it.
local function take_again(last)
  claim = last.claim
  for _, part in ipairs(last.found) do
    local slot, members = slot_of(part.iteration), {}
    for at, item in ipairs(part.items) do members[at] = member_of(a.stage, part.batch_id, item[1]) end
    for at, given in ipairs(open_at(fence, part.iteration) and claims_of(slot, members) or {}) do
      local stands = given.claim == claim and redis.call('ZSCORE', slot.work, members[at])
      if stands and not is_full then take(slot, part.iteration, members[at], given.attempt) end
    end
    write(slot)
  end
  if items_taken == 0 then claim = nil end
end
local function take_from(slot, iteration)
  local number = math.min(a.max_rows, MAX_ITEMS)
  local members = expired_items(slot, a.stage, now, a.lease_ms, number)
  while not is_full and members[1] do
    local num = take_all(slot, iteration, members)
    if num > 0 then count('stage_reclaimed:' .. a.stage, num) end
    if not is_full then members = expired_items(slot, a.stage, now, a.lease_ms, number) end
  end
  if not is_full then take_all(slot, iteration, in_work(slot, a.stage, 0, LAST_TURN, number)) end
end
local function nothing()
  local due = -1
  for _, open in ipairs(fence.window) do
    local slot = slot_of(open.iteration)
    local first = in_work(slot, a.stage, 1, BAND - 1, 1)[1]
    local left = first and math.max(0, redis.call('ZSCORE', slot.work, first) - a.stage * BAND - now)
    if left and (due < 0 or left < due) then due = left end
  end
  return { 'none', due, last_id(job_key('ready')) }
end
if is_ended() then return nothing() end
local last = unheard(who, a.heard)
if last then take_again(last) end
if items_taken == 0 then
  for _, open in ipairs(fence.window) do take_from(slot_of(open.iteration), open.iteration) end
end
if items_taken == 0 then return nothing() end
note_claimer(who, { claim = claim, found = found })
table.insert(values, 1, 'claimed')
table.insert(values, 2, cmsgpack.pack({ claim = claim, found = found, fields = fields }))
return values
