-- claim_prompt: {generator, heard, lease_ms, max_attempts, may_hedge, max_rounds, held_version, held_digest, oldest_only, engine}
--   heard: the number of the newest claim that the generator knows of, 0 before the first;
--   max_rounds: most rounds that a batch may take; held_version, held_digest: what the generator holds, or -1 and '';
--   oldest_only: of the oldest iteration alone, for a generator that holds batches without room: else each of them might hold younger
--   ones, and none take the work that makes room
--   engine: the kind of the generator's engine, where the job is deterministic
--   -> {claimed|hedged, entry, attempt, number, payload, manifest}
--    | {none, ms until a batch has taken long enough for a hedge, or -1, the last entry id of dispatched}
--    | {wrong_engine, the kind that the job is sampled with}
-- A claim whose answer was lost comes again first. Then the oldest iteration, and in it an expired lease: the oldest work holds the iteration up (I5). Then what is new.
-- A generator that finds neither in any iteration may hedge: work on a copy of another's oldest batch; the first publication
-- wins (I3). A batch is hedged once, and not after it lost a holder: it may be the batch that kills, and would kill two
-- generators at each attempt.
require_number(a.lease_ms, 1)
require_number(a.max_rounds, 1)
require_number(a.heard, 0, MAX_CLAIM)
local fence = read_fence()
local function nothing(hedge_ms)
  return { 'none', hedge_ms, last_id(job_key('dispatched')) }
end
if #fence.window == 0 or is_ended() then return nothing(-1) end
local kept = engine_of_job()
if is_other_engine(kept, a.engine) then return { 'wrong_engine', kept } end
local asked = a.oldest_only and { fence.window[1] } or fence.window
local now = now_ms()
-- A batch is late when its rounds take this many times the median of the latest: at 1, every second one would be. Which
-- round its holder is in isn't known here, so a batch gets the time of all that it may need.
local LATE = 1.5 * a.max_rounds
-- The next prompt of a slot, with its deliveries; nil where there is none.
local function take(slot)
  -- Not XAUTOCLAIM: it looks at ten pending entries only, and live leases would hide an expired one behind them.
  local expired = redis.call('XPENDING', slot.prompts, 'generators', 'IDLE', whole(a.lease_ms), '-', '+', '1')[1]
  if expired then
    local id, deliveries = expired[1], expired[4]
    local reclaimed = redis.call('XCLAIM', slot.prompts, 'generators', a.generator, whole(a.lease_ms), id)[1]
    if reclaimed then
      count('reclaimed')
      return entry_of(reclaimed), deliveries + 1
    end
  end
  local fresh = redis.call('XREADGROUP', 'GROUP', 'generators', a.generator, 'COUNT', '1', 'STREAMS', slot.prompts, '>')
  if fresh then return entry_of(fresh[1][2][1]), 1 end
end
-- The version that samples a batch: what the generator holds, where that may and is the very same; else the newest that may.
local function version_of(open, batch)
  local oldest, newest = range_of(open, batch)
  local found
  for _, known in ipairs(versions_of(fence)) do
    if known.version >= oldest and known.version <= newest then
      if known.version == a.held_version and known.digest == a.held_digest then return known.version end
      found = known.version
    end
  end
  return found
end
local function answer(outcome, prompt, attempt, number, version)
  keep_engine(kept, a.engine)
  return { outcome, prompt.id, attempt, number, prompt.batch, redis.call('HGET', WEIGHTS, version) }
end
local function claimed(outcome, open, batch, prompt, attempt, number)
  note_claimer(a.generator, { claim = number, iteration = open.iteration, batch_id = prompt.batch_id, attempt = attempt })
  return answer(outcome, prompt, attempt, number, version_of(open, batch))
end
local function is_expected(batch, prompt)
  return batch.state == 'expected' and batch.entry == prompt.id
end
-- A hedge of the lease before goes on beside the new holder, unless that is the hedger itself.
local function note_claim(slot, batch, prompt, deliveries, attempt)
  batch.holder, batch.claim, batch.attempt, batch.claimed_ms = a.generator, new_claim(), attempt, now
  if batch.hedger == a.generator then batch.hedger, batch.hedge, batch.hedged_ms = nil, nil, nil end
  write_batch(slot, prompt.batch_id, batch)
  if deliveries == 1 then
    redis.call('ZADD', slot.claims, whole(now), prompt.batch_id)
  else
    redis.call('ZREM', slot.claims, prompt.batch_id)
  end
end
-- Passes over what the asker itself holds, and nothing else: the oldest of the others is near the front of the index.
local AT_ONCE = 16
local function oldest_of_others(slot)
  local from = 0
  while true do
    local ids = redis.call('ZRANGE', slot.claims, from, from + AT_ONCE - 1)
    for _, id in ipairs(ids) do
      local batch = batch_of(slot, id)
      local copied = batch.holder and batch.holder ~= a.generator
        and redis.call('XRANGE', slot.prompts, batch.entry, batch.entry)[1]
      if copied then return id, batch, entry_of(copied) end
    end
    if #ids < AT_ONCE then return nil end
    from = from + AT_ONCE
  end
end
-- The claim that this generator has not heard of, where it stands.
local function again()
  local last = unheard(a.generator, a.heard)
  local open = last and open_at(fence, last.iteration)
  if not open then return nil end
  local slot = slot_of(last.iteration)
  local batch = batch_of(slot, last.batch_id)
  local is_holder = batch.claim == last.claim
  if batch.state ~= 'expected' or not (is_holder or batch.hedge == last.claim) then return nil end
  local row = redis.call('XRANGE', slot.prompts, batch.entry, batch.entry)[1]
  if not row then return nil end
  if is_holder then redis.call('XCLAIM', slot.prompts, 'generators', a.generator, '0', batch.entry, 'JUSTID') end
  return answer(is_holder and 'claimed' or 'hedged', entry_of(row), last.attempt, last.claim, version_of(open, batch))
end
local repeated = again()
if repeated then return repeated end
for _, open in ipairs(asked) do
  local slot = slot_of(open.iteration)
  local prompt, deliveries = take(slot)
  while prompt do
    local attempt, batch = tonumber(prompt.attempt) + deliveries - 1, batch_of(slot, prompt.batch_id)
    if is_expected(batch, prompt) then
      if attempt <= a.max_attempts then
        note_claim(slot, batch, prompt, deliveries, attempt)
        return claimed('claimed', open, batch, prompt, attempt, batch.claim)
      end
      local reason = 'its generators died ' .. (attempt - 1) .. ' times'
      bury(slot, prompt.batch_id, batch, reason, attempt - 1, prompt.batch)
    end
    drop_prompt(slot, prompt.id)
    prompt, deliveries = take(slot)
  end
end
local recent = a.may_hedge and recent_times() or {}
if #recent == 0 then return nothing(-1) end
table.sort(recent)
local due = -1
for _, open in ipairs(asked) do
  local slot = slot_of(open.iteration)
  local id, batch, copied = oldest_of_others(slot)
  if id then
    -- A clock that stepped back must not make it wait for as long as the step.
    local left = math.min(batch.claimed_ms, now) + LATE * recent[math.ceil(#recent / 2)] - now
    if left <= 0 then
      redis.call('ZREM', slot.claims, id)
      batch.hedger, batch.hedge, batch.hedged_ms = a.generator, new_claim(), now
      write_batch(slot, id, batch)
      count('hedged')
      -- What may be hedged has been delivered once.
      return claimed('hedged', open, batch, copied, tonumber(copied.attempt), batch.hedge)
    end
    due = due < 0 and math.ceil(left) or math.min(due, math.ceil(left))
  end
end
return nothing(due)
