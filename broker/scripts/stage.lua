-- What a stage worker calls (broker/stage_side.py).

-- claim_rows: {worker, heard, stage, name, stages, lease_ms, max_attempts, max_rows, held, is_idle}
-- Leases items of a stage to a worker.
--   worker        The id of the worker.
--   heard         The number of the newest claim of this stage that the worker knows of; 0 before the first.
--   stage         The number of the stage, counted from 1.
--   name          The name of the stage, for reasons.
--   stages        The job's stages: a list of {unit, after}.
--   lease_ms      How long the leases last.
--   max_attempts  Claims of one item, after which its batch is buried.
--   max_rows      Most rows of several items.
--   held          batch id -> digest, of the batches that the worker still has
--   is_idle       True of a worker that has no items in hand: it is woken first.
--   -> {claimed, packed {claim, batches, fields}, n x the value of a field}
--        claim    The number of the claim.
--        batches  A list of {iteration, batch_id, digest, items}; items: a list of {item, attempt}.
--        fields   Fields of `items`, each once: batches that the worker lacks, and the columns that its items are made
--                 of.
--    | {none, ms until a lease ends, or -1 where there is none}
-- A large batch is not among the fields: the worker reads it where it stands, since here it would be copied three
-- times.
-- The oldest iteration comes first, and in it an expired lease; then what is free. The first item goes out whatever its
-- size.
-- Keys:
--   job            read: `state`; of an ended job nothing is handed out
--   fence          read: the open iterations
--   work           read: expired leases and free items; written: the ends of the new leases
--   items          read: b/BATCH_ID and c/ITEM, for the answer; read and written: l/ITEM, the last claim
--   ledger         read: the state and the shape of a batch; written: `dead`, after an item's last attempt
--   claimers       read: the claim whose answer was lost; written: the one that is answered now
--   waiting        written: the worker, where there is nothing for it; removed where there is, for each stage
--   progress       written: claim; where a batch dies published:S, waiting:S and dead:S
--   dead, buried   written: a batch whose item has no attempts left
--   counters       written: stage_reclaimed:STAGE, dead
require_number(a.lease_ms, 1)
require_number(a.max_rows, 1)
require_number(a.stage, 1, #a.stages)
require_number(a.heard, 0, MAX_CLAIM)
local fence = read_fence()
local now = now_ms()
local stage = a.stages[a.stage]
-- Most items and bytes of one claim, and the size from which on a batch is left out of it.
local MAX_ITEMS = 256
local MAX_BYTES = 2 ^ 25
local LARGE_BYTES = 2 ^ 18
-- The answer: the items by batch, and fields with their values, in the same order.
local claimed_batches = {}
local fields = {}
local values = {}
-- Field -> true, of those that are in the answer already.
local is_known = {}
-- Batch id -> its record in the ledger, read once.
local batches = {}
-- Attempt and last fault -> the packed claim of it: all items of a claim where these are the same have the same.
local packed = {}
-- So much the claim has, and whether there is no room for more.
local items_taken = 0
local rows_taken = 0
local bytes_taken = 0
local is_full = false
-- Words of ZADD on `work`, and of HSET on `items`, that `write` puts there.
local leased = {}
local claimed = {}
local lease_end = score_of(a.stage, now + a.lease_ms)
-- Items of dead batches that one claim buries: it ends behind the batch that reaches it, and the next claim goes on.
local MAX_BURIED = 2 ^ 15
local num_buried = 0
local who = whole(a.stage) .. '/' .. a.worker
local claim = nil
local function known_batch(slot, id)
  batches[id] = batches[id] or batch_of(slot, id)
  return batches[id]
end
-- Answers fields of `items`, each once.
local function add(slot, names)
  for at, value in ipairs(each_of('HMGET', slot.items, names)) do
    fields[#fields + 1] = names[at]
    values[#values + 1] = value
    bytes_taken = bytes_taken + #value
  end
end
local function add_batch(slot, id, batch)
  local field = 'b/' .. id
  if is_known[field] or a.held[id] == batch.digest then return end
  is_known[field] = true
  local size = redis.call('HSTRLEN', slot.items, field)
  -- A large one counts for the limit as well: the worker has to hold it.
  if size > LARGE_BYTES then bytes_taken = bytes_taken + size else add(slot, { field }) end
end
local function add_inputs(slot, id, batch, item)
  local names = {}
  for _, before in ipairs(stage.after) do
    local first, last = overlap(stage, a.stages[before], batch, item)
    for other = first, last do
      local field = 'c/' .. member_of(before, id, other)
      if not is_known[field] then
        names[#names + 1] = field
        is_known[field] = true
      end
    end
  end
  add(slot, names)
end
local function has_room(rows)
  -- The first item has room whatever its size, or a stage with large items would never get one.
  return items_taken == 0 or (rows_taken + rows <= a.max_rows and items_taken < MAX_ITEMS and bytes_taken < MAX_BYTES)
end
local function write(slot)
  call_with('HSET', slot.items, claimed)
  call_with('ZADD', slot.work, leased)
  claimed = {}
  leased = {}
end
local function lease_out(member, attempt, fault)
  claim = claim or new_claim()
  local key = whole(attempt) .. ' ' .. (type(fault) == 'string' and fault or '')
  packed[key] = packed[key]
    or cmsgpack.pack({
      worker = a.worker,
      attempt = attempt,
      claim = claim,
      claimed_ms = now,
      lease_ms = a.lease_ms,
      fault = fault,
    })
  claimed[#claimed + 1] = 'l/' .. member
  claimed[#claimed + 1] = packed[key]
  -- ZADD takes the score before the member.
  leased[#leased + 1] = lease_end
  leased[#leased + 1] = member
end
-- Takes or buries an item, or says that there is no room for it.
local function take(slot, iteration, member, attempt, fault)
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
  lease_out(member, attempt, fault)
  item = tonumber(item)
  local last = claimed_batches[#claimed_batches]
  if not last or last.batch_id ~= id then
    last = { iteration = iteration, batch_id = id, digest = batch.digest, items = {} }
    claimed_batches[#claimed_batches + 1] = last
  end
  last.items[#last.items + 1] = { item, attempt }
  items_taken = items_taken + 1
  rows_taken = rows_taken + rows
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
    if not is_full then take(slot, iteration, members[at], claim.attempt + 1, claim.fault) end
  end
  write(slot)
  is_full = is_full or not has_room(1)
  return items_taken - before
end
-- The items of the claim that this worker has not heard of, those that stand under it.
local function take_again(last)
  claim = last.claim
  for _, part in ipairs(last.batches) do
    local slot = slot_of(part.iteration)
    local members = {}
    for at, item in ipairs(part.items) do members[at] = member_of(a.stage, part.batch_id, item[1]) end
    local claims = open_at(fence, part.iteration) and claims_of(slot, members) or {}
    for at, item_claim in ipairs(claims) do
      local stands = item_claim.claim == claim and redis.call('ZSCORE', slot.work, members[at])
      if stands and not is_full then take(slot, part.iteration, members[at], item_claim.attempt, item_claim.fault) end
    end
    write(slot)
  end
  if items_taken == 0 then claim = nil end
end
local function take_from(slot, iteration)
  local number = math.min(a.max_rows, MAX_ITEMS)
  -- Each round leases or removes what it has got, so that the next look finds others.
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
    -- Less the band of the stage a score is the end of a lease in ms of Unix time.
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
note_claimer(who, { claim = claim, batches = claimed_batches })
-- A worker may wait for several stages; what it has got of one keeps it busy for all.
for number in ipairs(a.stages) do redis.call('ZREM', WAITING, whole(number) .. '/' .. a.worker) end
-- Before the values, which stay in the order of `fields`.
table.insert(values, 1, 'claimed')
table.insert(values, 2, cmsgpack.pack({ claim = claim, batches = claimed_batches, fields = fields }))
return values

-- read_batch: {iteration, batch_id, digest}
-- Reads a batch where it stands next to its columns: a large one is not copied into a claim.
--   iteration  Its iteration.
--   batch_id   The batch.
--   digest     The digest that the claim named.
--   -> {read, RolloutBatch}
--    | {gone}   other content stands there by now, or none
-- Keys:
--   ledger   read: the state and the digest of the batch
--   items    read: b/BATCH_ID, the RolloutBatch
local slot = slot_of(a.iteration)
local batch = batch_of(slot, a.batch_id)
local is_published = batch.state == 'published' and batch.digest == a.digest
local rollouts = is_published and redis.call('HGET', slot.items, 'b/' .. a.batch_id)
if not rollouts then return { 'gone' } end
return { 'read', rollouts }

-- put_rows: {stages, runs}
-- Puts the columns of items.
--   stages    The job's stages: a list of {unit, after}.
--   runs      A list of {stage, iteration, batch_id, of, items, has_inputs, digests}, each of a stage and a batch.
--               of          The digest of the batch that the columns are made of.
--               items       The numbers of the items.
--               has_inputs  True where the stage reads columns of others.
--               digests     The digest of each item's columns, where another stage reads them.
--   payloads  for each item its packed columns, and with has_inputs the digests of the columns that it is made of, one
--             behind the other
--   -> {put, a word for each item}
--      accepted   the columns stand
--      again      the same ones stood already
--      divergent  other ones stand
--      not_ready  the columns that it was made of are not those that stand there
--      settled    its batch is dead or another one, or its iteration or job over
-- Content decides, not the lease: the first put of an item counts, of any worker, and a repeat writes nothing (I3).
-- A run asks and writes all at once.
-- Keys:
--   job, fence      read: the columns of an ended job and of a closed iteration are settled
--   ledger          read and written: `left`, how many items of the batch lack columns, and `entry`
--   items           read: columns that stand, and digests of inputs; written: c/, d/ and n/ITEM; removed: l/ITEM
--   work            read: an item whose inputs are not there is not in work; written: items that have their inputs now;
--                   removed: those that were put
--   rollouts        written: the entry of a batch whose columns are complete, without its payload
--   progress        written: waiting:S
--   waiting         removed: the stage workers that are woken
--   counters        written: stage_rows:STAGE
--   onbeat:wake:W   channel: calls a stage worker that waits
local fence = read_fence()
local has_ended = is_ended()
local num_free = {}
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
-- Which items of a run were made of the columns that stand there: a restart may have lost those, and others came.
-- input_digests: of each item, the digests of the columns that it was made of, one behind the other.
local function have_inputs(slot, run, batch, input_digests)
  local stage = a.stages[run.stage]
  -- The names of all inputs in `items`, the place at which those of each item end, and what is answered.
  local names = {}
  local ends = {}
  local have = {}
  local first = 1
  for at, item in ipairs(run.items) do
    for _, name in ipairs(input_names(stage, run.batch_id, item, batch)) do names[#names + 1] = name end
    ends[at] = #names
  end
  local digests = each_of('HMGET', slot.items, names)
  for at in ipairs(run.items) do
    local are_there = true
    local of_item = {}
    for number = first, ends[at] do
      are_there = are_there and digests[number] ~= false
      of_item[#of_item + 1] = digests[number] or ''
    end
    have[at] = are_there and table.concat(of_item) == input_digests[at]
    -- The inputs of the next item follow those of this one.
    first = ends[at] + 1
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
local function readers(maker, stage, batch, items)
  local order = {}
  local parts = {}
  for _, item in ipairs(items) do
    local first, last = overlap(maker, stage, batch, item)
    for other = first, last do
      if not parts[other] then order[#order + 1] = other end
      parts[other] = (parts[other] or 0) + 1
    end
  end
  return order, parts
end
local function free_readers(slot, run, batch, items)
  local maker = a.stages[run.stage]
  for number, stage in ipairs(a.stages) do
    if reads(stage, run.stage) then
      local needed = num_inputs(stage, batch)
      local order, parts = readers(maker, stage, batch, items)
      for _, item in ipairs(order) do
        local field = 'n/' .. member_of(number, run.batch_id, item)
        -- A reader of one input needs no count: this is that input.
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
-- The batch stays where it is, and the trainer reads it there beside its columns: written again, it would cross the
-- file twice.
local function complete(slot, id, batch)
  -- From here on the trainer sees the batch.
  batch.entry = redis.call('XADD', slot.rollouts, '*', 'batch_id', id, 'digest', batch.digest)
  redis.call('HINCRBY', PROGRESS, 'waiting:' .. slot.index, -num_rows(batch))
end
-- values: of each item that is accepted, false for the others.
local function write(slot, run, values, batch)
  local members = {}
  local items = {}
  local words = {}
  for at, item in ipairs(run.items) do
    if values[at] then
      local member = member_of(run.stage, run.batch_id, item)
      members[#members + 1] = member
      items[#items + 1] = item
      words[#words + 1] = 'c/' .. member
      words[#words + 1] = values[at]
      if run.digests[at] then
        words[#words + 1] = 'd/' .. member
        words[#words + 1] = run.digests[at]
      end
    end
  end
  if #items == 0 then return end
  call_with('HSET', slot.items, words)
  call_with('HDEL', slot.items, behind('l/', members))
  call_with('ZREM', slot.work, members)
  free_readers(slot, run, batch, items)
  count('stage_rows:' .. run.stage, #items * item_rows(a.stages[run.stage], batch))
  -- Counts items, not rows; of all stages together.
  batch.left = batch.left - #items
  if batch.left == 0 then complete(slot, run.batch_id, batch) end
  write_batch(slot, run.batch_id, batch)
end
local function outcome_of(run, batch, stands, values, score, has_inputs)
  if has_ended or not batch or batch.digest ~= run.of then return 'settled' end
  -- Bytes are compared: the same columns packed otherwise would be other ones.
  if stands then return stands == values and 'again' or 'divergent' end
  -- Without a score the item was never freed: its inputs aren't there.
  if not score or not has_inputs then return 'not_ready' end
  return 'accepted'
end
local function put(run, out)
  require_number(run.stage, 1, #a.stages)
  -- Only a published batch of an open iteration is waited for.
  local slot = open_at(fence, run.iteration) and slot_of(run.iteration)
  local batch = slot and batch_of(slot, run.batch_id)
  if not batch or batch.state ~= 'published' or not batch.shape then
    slot = nil
    batch = nil
  end
  local members = {}
  local there = {}
  local scores = {}
  local have = {}
  -- Item -> its columns that this call has accepted: a second put of it in the same run meets them.
  local accepted = {}
  local taken = {}
  local values = {}
  local input_digests = {}
  -- Each item's columns come first, and then the digests of its inputs. All are taken, also of a batch that is settled:
  -- the payloads of the next run follow.
  for at in ipairs(run.items) do
    values[at] = payload()
    input_digests[at] = run.has_inputs and payload() or ''
  end
  if slot then
    for at, item in ipairs(run.items) do members[at] = member_of(run.stage, run.batch_id, item) end
    there = each_of('HMGET', slot.items, behind('c/', members))
    scores = each_of('ZMSCORE', slot.work, members)
    have = have_inputs(slot, run, batch, input_digests)
  end
  for at, item in ipairs(run.items) do
    local outcome = outcome_of(run, batch, there[at] or accepted[item], values[at], scores[at], have[at])
    taken[at] = outcome == 'accepted' and values[at]
    accepted[item] = accepted[item] or taken[at] or nil
    out[#out + 1] = outcome
  end
  if slot then write(slot, run, taken, batch) end
end
local out = { 'put' }
for _, run in ipairs(a.runs) do put(run, out) end
for number, num in pairs(num_free) do wake(number, num) end
return out

-- fail_rows: {lease, stages, max_attempts, reason, is_released, fault}
-- Gives an item of a stage back, or buries its batch after the last attempt (I6).
--   lease         {stage, iteration, batch_id, item, claim}, as in `renew`.
--   stages        The job's stages: a list of {unit, after}.
--   max_attempts  Claims of one item, after which its batch is buried.
--   reason        Why it failed; the ledger has it of a dead batch.
--   is_released   True where the fault was not the item's: the attempt doesn't count.
--   fault         The words of an exception that no code of ours raised, or ''. By the same ones it fails once again,
--                 and no more.
--   -> {retried} | {dead} | {released} | {settled}   see `give_back`
-- Keys:
--   job, fence          read: an ended job and a closed iteration are settled
--   ledger              read: the state and the shape of the batch; written: `dead`, after an item's last attempt
--   items               read and written: l/ITEM, the claim without its holder; removed with a dead batch
--   work                written: the item, free again; removed with a dead batch
--   missing             removed: the claim is over
--   progress            written: `setback`, what failed last and why; where a batch dies published:S, waiting:S and
--                       dead:S
--   dead, buried        written: a batch after an item's last attempt
--   waiting             removed: the stage worker that is woken
--   counters            written: stage_failed:STAGE, stage_released:STAGE, dead
--   onbeat:role:stage   never there: the right to read it shows the caller's role
local slot = slot_of(a.lease.iteration)
local stage = a.lease.stage
local id = a.lease.batch_id
local item = a.lease.item
local counter = 'stage_%s:' .. stage
local outcome, batch, attempts, why =
  give_back(a.lease, 'published', counter, a.max_attempts, a.is_released, a.reason, a.fault)
if outcome == 'dead' then
  bury_staged(slot, id, batch, a.stages, why, attempts)
elseif outcome ~= 'settled' then
  set_free(slot, stage, id, item, item)
  wake(stage, 1)
end
return { outcome }
