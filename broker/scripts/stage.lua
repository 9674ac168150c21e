-- What a stage worker calls (broker/stage_side.py).

-- claim_rows: {worker, heard, stage, name, stages, lease_ms, max_attempts, max_rows, held, is_idle}
--   heard: the number of the newest claim of this stage that the worker knows of, 0 before the first;
--   stage, name: its number, from 1, and its name; held: batch id -> digest, of batches that the worker still has
--   -> {claimed, packed {claim, found, fields}, n x the value of a field}; claim: its number; found: of {iteration, batch_id, digest, items: of {item, attempt}};
--      fields: of `items`, each once: batches that the worker lacks, and what other stages made of the items' rows.
--      A large batch is not among them: the worker reads it where it stands, since here it would be copied three times
--    | {none, ms until a lease ends, or -1, ms from which on to wait for a wake}
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
-- Items of dead batches that one claim buries: it ends behind the batch that reaches it, and the next claim goes on.
local MAX_BURIED, num_buried = 2 ^ 15, 0
local who, claim = whole(a.stage) .. '/' .. a.worker, nil
local function known_batch(slot, id)
  batches[id] = batches[id] or batch_of(slot, id)
  return batches[id]
end
-- Answers fields of `items`, each once.
local function add(slot, names)
  for at, value in ipairs(each_of('HMGET', slot.items, names)) do
    fields[#fields + 1], values[#values + 1] = names[at], value
    bytes_taken = bytes_taken + #value
  end
end
local function add_batch(slot, id, batch)
  local field = 'b/' .. id
  if is_known[field] or a.held[id] == batch.digest then return end
  is_known[field] = true
  local size = redis.call('HSTRLEN', slot.items, field)
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
  call_with('HSET', slot.items, claimed)
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
    num_buried = num_buried + bury_staged(slot, id, batch, a.stages, reason, attempt - 1)
    batches[id] = {}
    is_full = num_buried >= MAX_BURIED
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
  for at, text in ipairs(each_of('HMGET', slot.items, behind('l/', members))) do
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
  note_waiting(a.stage, a.worker, a.is_idle and now + IDLE_MS or now)
  return { 'none', due }
end
if is_ended() then return nothing() end
local last = unheard(who, a.heard)
if last then take_again(last) end
if items_taken == 0 then
  for _, open in ipairs(fence.window) do take_from(slot_of(open.iteration), open.iteration) end
end
if items_taken == 0 then return num_buried >= MAX_BURIED and { 'none', 0 } or nothing() end
note_claimer(who, { claim = claim, found = found })
for number in ipairs(a.stages) do redis.call('ZREM', WAITING, whole(number) .. '/' .. a.worker) end
table.insert(values, 1, 'claimed')
table.insert(values, 2, cmsgpack.pack({ claim = claim, found = found, fields = fields }))
return values

-- read_batch: {iteration, batch_id, digest} -> {read, RolloutBatch} | {gone}: other content stands there by now, or none
-- A batch that stages read, where it stands beside its columns: a large one is not copied into a claim.
local slot = slot_of(a.iteration)
local batch = batch_of(slot, a.batch_id)
local rollouts = batch.state == 'published' and batch.digest == a.digest and redis.call('HGET', slot.items, 'b/' .. a.batch_id)
if not rollouts then return { 'gone' } end
return { 'read', rollouts }

-- put_rows: {stages, runs}; runs: of {stage, iteration, batch_id, of, items, has_inputs, digests}, items of a stage and a
--   batch; of: digest of the batch that the columns are made of; has_inputs: whether its stage reads columns of others; digests: of each
--   item's columns, where another stage reads them; payloads of each item its packed columns and, with has_inputs, the digests of the
--   columns that it is made of, one behind the other
--   -> {put, n x (accepted | again | divergent | not_ready | settled)}
-- Content decides, not the lease: the first put of an item counts, of any worker, and a repeat writes nothing (I3).
-- not_ready: what it was made of is not what stands there; settled: its batch is dead or another one, its iteration or job over.
-- A run asks and writes all at once.
local fence, has_ended, num_free = read_fence(), is_ended(), {}
local function reads(stage, index)
  for _, before in ipairs(stage.after) do
    if before == index then return true end
  end
  return false
end
-- The digests that stand for the inputs of an item, by their names in `items`.
local function input_names(stage, id, item, batch)
  local names = {}
  for _, before in ipairs(stage.after) do
    local first, last = overlap(stage, a.stages[before], batch, item)
    for other = first, last do names[#names + 1] = 'd/' .. member_of(before, id, other) end
  end
  return names
end
-- Which items of a run were made of the columns that stand there: a restart may have lost those, and others came. told: of each item,
-- the digests of the columns that it was made of, one behind the other.
local function have_inputs(slot, run, batch, told)
  local stage, names, ends, have, first = a.stages[run.stage], {}, {}, {}, 1
  for at, item in ipairs(run.items) do
    for _, name in ipairs(input_names(stage, run.batch_id, item, batch)) do names[#names + 1] = name end
    ends[at] = #names
  end
  local digests = each_of('HMGET', slot.items, names)
  for at in ipairs(run.items) do
    local are_there, of_item = true, {}
    for number = first, ends[at] do
      are_there = are_there and digests[number] ~= false
      of_item[#of_item + 1] = digests[number] or ''
    end
    have[at], first = are_there and table.concat(of_item) == told[at], ends[at] + 1
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
        local there = needed == 1 and 1 or redis.call('HINCRBY', slot.items, field, parts[item])
        if there == needed then
          if needed > 1 then redis.call('HDEL', slot.items, field) end
          set_free(slot, number, run.batch_id, item, item)
          num_free[number] = (num_free[number] or 0) + 1
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
  call_with('HSET', slot.items, words)
  call_with('HDEL', slot.items, behind('l/', members))
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
  local members, there, scores, have, made, taken, values, told = {}, {}, {}, {}, {}, {}, {}, {}
  for at in ipairs(run.items) do values[at], told[at] = payload(), run.has_inputs and payload() or '' end
  if slot then
    for at, item in ipairs(run.items) do members[at] = member_of(run.stage, run.batch_id, item) end
    there = each_of('HMGET', slot.items, behind('c/', members))
    scores = each_of('ZMSCORE', slot.work, members)
    have = have_inputs(slot, run, batch, told)
  end
  for at, item in ipairs(run.items) do
    local outcome = outcome_of(run, batch, there[at] or made[item], values[at], scores[at], have[at])
    taken[at] = outcome == 'accepted' and values[at]
    made[item] = made[item] or taken[at] or nil
    out[#out + 1] = outcome
  end
  if slot then write(slot, run, taken, batch) end
end
local out = { 'put' }
for _, run in ipairs(a.runs) do put(run, out) end
for number, num in pairs(num_free) do wake(number, num) end
return out

-- fail_rows: {lease, stages, max_attempts, reason, is_released}; lease: as of `renew`
--   -> {retried} | {dead} | {released} | {settled}: see `give_back`
local slot, stage, id, item = slot_of(a.lease.iteration), a.lease.stage, a.lease.batch_id, a.lease.item
local outcome, batch, attempts = give_back(a.lease, 'published', 'stage_%s:' .. stage, a.max_attempts, a.is_released)
if outcome == 'dead' then
  bury_staged(slot, id, batch, a.stages, a.reason, attempts)
elseif outcome ~= 'settled' then
  set_free(slot, stage, id, item, item)
  wake(stage, 1)
end
return { outcome }
