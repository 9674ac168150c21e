-- claim_prompt: {generator, heard, lease_ms, max_attempts, may_hedge, max_rounds, held_version, held_digest, oldest_only, engine}
--   heard: the number of the newest claim that the generator knows of, 0 before the first;
--   max_rounds: most rounds that a batch may take; held_version, held_digest: what the generator holds, or -1 and '';
--   oldest_only: of the oldest iteration alone, for a generator that holds batches without room: else each of them might hold younger
--   ones, and none take the work that makes room
--   engine: the kind of the generator's engine, where the job is deterministic
--   -> {claimed|hedged, attempt, number, payload, manifest}
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
-- The next batch of a slot in work, and whether another had leased it; nil where there is none.
local function take(slot)
  local expired = expired_items(slot, 0, now, a.lease_ms, 1)[1]
  if expired then count('reclaimed') end
  return expired or in_work(slot, 0, 0, LAST_TURN, 1)[1], expired ~= nil
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
local function answer(outcome, open, id, batch, prompts, attempt, number)
  keep_engine(kept, a.engine)
  note_claimer(a.generator, { claim = number, iteration = open.iteration, batch_id = id })
  return { outcome, attempt, number, prompts, redis.call('HGET', WEIGHTS, version_of(open, batch)) }
end
-- A hedge of the lease before goes on beside the new holder, unless that is the hedger itself.
local function lease(slot, id, member, last, was_leased)
  last.worker, last.claim, last.attempt, last.claimed_ms, last.lease_ms = a.generator, new_claim(), last.attempt + 1, now, a.lease_ms
  if last.hedger == a.generator then last.hedger, last.hedge, last.hedged_ms = nil, nil, nil end
  redis.call('HSET', slot.columns, 'l/' .. member, cmsgpack.pack(last))
  redis.call('ZADD', slot.work, whole(now + a.lease_ms), member)
  if was_leased then
    redis.call('ZREM', slot.claims, id)
  else
    redis.call('ZADD', slot.claims, whole(now), id)
  end
end
-- Passes over what the asker itself holds, and nothing else: the oldest of the others is near the front of the index.
local AT_ONCE = 16
local function oldest_of_others(slot)
  local from = 0
  while true do
    local ids = redis.call('ZRANGE', slot.claims, from, from + AT_ONCE - 1)
    for _, id in ipairs(ids) do
      local last = claim_of(slot, member_of(0, id, 0))
      local prompts = last.worker and last.worker ~= a.generator and redis.call('HGET', slot.prompts, id)
      if prompts then return id, last, prompts end
    end
    if #ids < AT_ONCE then return nil end
    from = from + AT_ONCE
  end
end
-- The claim that this generator has not heard of, where it stands.
local function again()
  local claim = unheard(a.generator, a.heard)
  local open = claim and open_at(fence, claim.iteration)
  if not open then return nil end
  local slot, member = slot_of(claim.iteration), member_of(0, claim.batch_id, 0)
  local last, prompts = claim_of(slot, member), redis.call('HGET', slot.prompts, claim.batch_id)
  local is_holder = last.claim == claim.claim
  local stands = prompts and (is_holder or last.hedge == claim.claim) and redis.call('ZSCORE', slot.work, member)
  if not stands then return nil end
  if is_holder then redis.call('ZADD', slot.work, whole(now + a.lease_ms), member) end
  local outcome, batch = is_holder and 'claimed' or 'hedged', batch_of(slot, claim.batch_id)
  return answer(outcome, open, claim.batch_id, batch, prompts, last.attempt, claim.claim)
end
local repeated = again()
if repeated then return repeated end
for _, open in ipairs(asked) do
  local slot = slot_of(open.iteration)
  local member, was_leased = take(slot)
  while member do
    local id = string.match(member, '^0/(.*)/0$') or ''
    local batch, prompts = batch_of(slot, id), redis.call('HGET', slot.prompts, id)
    if batch.state == 'expected' and prompts then
      local last = claim_of(slot, member)
      if last.attempt < a.max_attempts then
        lease(slot, id, member, last, was_leased)
        return answer('claimed', open, id, batch, prompts, last.attempt, last.claim)
      end
      bury(slot, id, batch, 'its generators died ' .. last.attempt .. ' times', last.attempt)
    else
      redis.call('ZREM', slot.work, member)
    end
    member, was_leased = take(slot)
  end
end
local recent = a.may_hedge and unpacked(redis.call('HGET', PROGRESS, 'recent_ms')) or {}
if #recent == 0 then return nothing(-1) end
table.sort(recent)
local due = -1
for _, open in ipairs(asked) do
  local slot = slot_of(open.iteration)
  local id, last, prompts = oldest_of_others(slot)
  if id then
    -- A clock that stepped back must not make it wait for as long as the step.
    local left = math.min(last.claimed_ms, now) + LATE * recent[math.ceil(#recent / 2)] - now
    if left <= 0 then
      redis.call('ZREM', slot.claims, id)
      last.hedger, last.hedge, last.hedged_ms = a.generator, new_claim(), now
      redis.call('HSET', slot.columns, 'l/' .. member_of(0, id, 0), cmsgpack.pack(last))
      count('hedged')
      return answer('hedged', open, id, batch_of(slot, id), prompts, last.attempt, last.hedge)
    end
    due = due < 0 and math.ceil(left) or math.min(due, math.ceil(left))
  end
end
return nothing(due)
