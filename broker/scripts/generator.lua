-- What a generator calls (broker/generator_side.py); `renew` is a stage worker's as well.

-- claim_prompt: {generator, heard, lease_ms, max_attempts, may_hedge, max_rounds, held_version, held_digest,
--   oldest_only, is_idle, engine}
-- Leases the next prompt batch of the job to a generator.
--   generator     The id of the generator.
--   heard         The number of the newest claim that the generator knows of; 0 before the first.
--   lease_ms      How long the lease lasts.
--   max_attempts  Claims of one batch, after which it is buried.
--   may_hedge     True of an idle generator that may work on a copy of another's batch.
--   max_rounds    Most rounds of sampling that a batch may take.
--   held_version  The version that the generator has loaded; -1 of none.
--   held_digest   Its digest; '' of none.
--   oldest_only   True of a generator that holds batches without room: only the oldest iteration is looked at.
--   is_idle       True of a generator that samples nothing: it is woken first.
--   engine        The kind of the generator's engine, where the job is deterministic.
--   -> {claimed, attempt, number, payload, manifest}
--    | {hedged, attempt, number, payload, manifest}   a copy of another's batch
--    | {none, ms until a batch is late enough for a hedge, or until there is more to look at; -1 of neither}
--    | {unproved, manifest}   there is a batch, of a version that this generator's engine has not shown yet (I11)
--    | {wrong_engine, the kind that the job is sampled with}
-- A claim whose answer was lost comes again first. Then the oldest iteration, and in it an expired lease: the oldest
-- work holds the iteration up (I5). Then what is new.
-- Without oldest_only each generator without room might hold batches of younger iterations, and none take the work that
-- makes room.
-- A generator that finds neither in any iteration may hedge: work on a copy of another's oldest batch; the first
-- publication wins (I3). A batch is hedged once, and not after it lost a holder: it may be the batch that kills, and
-- would kill two generators at each attempt.
-- Keys:
--   job            read: `state`; of an ended job nothing is handed out
--   fence          read: the open iterations, and the versions that sample them
--   weights        read: the manifest that the answer carries
--   probes, proofs   read: whether the generator has shown what it computes with the version
--   progress       read: `recent_ms`, from which a hedge is due; written: `claim`, and `engine` by the job's first
--                  claim
--   claimers       read: the claim whose answer was lost; written: the one that is answered now
--   waiting        written: the generator, where there is nothing for it; removed where there is
--   work           read: expired leases and free turns; written: the end of the new lease
--   items          read and written: l/ITEM, the last claim of a batch
--   claims         read: whom to hedge; written: a first holder; removed where a lease was lost or is hedged
--   prompts        read: PromptBatch
--   ledger         read: the state of a batch; written: `dead`, after its last attempt
--   dead, buried   written: a batch without attempts left
--   counters       written: reclaimed, lost, hedged, dead
require_number(a.lease_ms, 1)
require_number(a.max_rounds, 1)
require_number(a.heard, 0, MAX_CLAIM)
local fence = read_fence()
local now = now_ms()
local function nothing(hedge_ms)
  note_waiting(0, a.generator, a.is_idle and now + IDLE_MS or now)
  return { 'none', hedge_ms }
end
if #fence.window == 0 or is_ended() then return nothing(-1) end
local engine = engine_of_job()
if is_other_engine(engine, a.engine) then return { 'wrong_engine', engine } end
local window = a.oldest_only and { fence.window[1] } or fence.window
-- A batch is late when its rounds take this many times the median of the latest: at 1, every second one would be. Which
-- round its holder is in isn't known here, so a batch gets the time of all that it may need.
local LATE = 1.5 * a.max_rounds
-- The batch of a slot that is claimed next, and whether its generator has let its lease expire; nil where there is
-- none. Batches whose lease has expired come before new ones.
local function take(slot)
  -- Of what is free, the lowest turn: what was sent first.
  local expired = expired_items(slot, 0, now, a.lease_ms, 1)[1]
  return expired or in_work(slot, 0, 0, LAST_TURN, 1)[1], expired ~= nil
end
local function note_reclaimed(was_leased)
  if not was_leased then return end
  count('reclaimed')
  count('lost')
end
-- The version that samples a batch: what the generator holds, where that may and is the very same; else the newest that
-- may.
local function version_of(open, batch)
  local oldest, newest = range_of(open, batch)
  local newest_known
  for _, known in ipairs(versions_of(fence)) do
    -- Versions are in ascending order, so the last one that fits is the newest.
    if known.version >= oldest and known.version <= newest then
      if known.version == a.held_version and known.digest == a.held_digest then return known.version end
      newest_known = known.version
    end
  end
  return newest_known
end
-- The answer to a generator that has yet to show what its engine computes with the version of this batch; nil where it
-- has.
-- Nothing is leased then: the batch waits for the first one that has.
local function proof_due(open, batch)
  local version = version_of(open, batch)
  if is_proved(version, digest_of(fence, version), a.generator) then return nil end
  return { 'unproved', redis.call('HGET', WEIGHTS, version) }
end
local function answer(outcome, open, id, batch, prompts, attempt, number)
  keep_engine(engine, a.engine)
  note_claimer(a.generator, { claim = number, iteration = open.iteration, batch_id = id })
  redis.call('ZREM', WAITING, '0/' .. a.generator)
  return { outcome, attempt, number, prompts, redis.call('HGET', WEIGHTS, version_of(open, batch)) }
end
-- A hedge of the lease before goes on beside the new holder, unless that is the hedger itself.
local function lease(slot, id, member, last, was_leased)
  last.worker = a.generator
  last.claim = new_claim()
  last.attempt = last.attempt + 1
  last.claimed_ms = now
  last.lease_ms = a.lease_ms
  -- The hedger is the holder now: its own copy would be counted as another's.
  if last.hedger == a.generator then
    last.hedger = nil
    last.hedge = nil
    last.hedged_ms = nil
  end
  redis.call('HSET', slot.items, 'l/' .. member, cmsgpack.pack(last))
  -- Stage 0 begins at score 0: the end of the lease is the score.
  redis.call('ZADD', slot.work, whole(now + a.lease_ms), member)
  if was_leased then
    redis.call('ZREM', slot.claims, id)
  else
    redis.call('ZADD', slot.claims, whole(now), id)
  end
end
-- Passes over what the asker itself holds, and nothing else: the oldest of the others is near the front of the index.
-- One that holds more than it passes over hedges nothing.
local AT_ONCE = 16
local MAX_PASSED = 1024
local function oldest_of_others(slot)
  local from = 0
  while from < MAX_PASSED do
    local ids = redis.call('ZRANGE', slot.claims, from, from + AT_ONCE - 1)
    for _, id in ipairs(ids) do
      local last = claim_of(slot, member_of(0, id, 0))
      local prompts = last.worker and last.worker ~= a.generator and redis.call('HGET', slot.prompts, id)
      if prompts then return id, last, prompts end
    end
    if #ids < AT_ONCE then return nil end
    from = from + AT_ONCE
  end
  return nil
end
-- The claim that this generator has not heard of, where it stands.
local function again()
  local claim = unheard(a.generator, a.heard)
  local open = claim and open_at(fence, claim.iteration)
  if not open then return nil end
  local slot = slot_of(claim.iteration)
  local member = member_of(0, claim.batch_id, 0)
  local last = claim_of(slot, member)
  local prompts = redis.call('HGET', slot.prompts, claim.batch_id)
  local is_holder = last.claim == claim.claim
  local stands = prompts and (is_holder or last.hedge == claim.claim) and redis.call('ZSCORE', slot.work, member)
  if not stands then return nil end
  local batch = batch_of(slot, claim.batch_id)
  -- The version may be another one than at the claim that was lost. The claim stands meanwhile, and comes again after
  -- the proof.
  local unproved = proof_due(open, batch)
  if unproved then return unproved end
  -- The lease begins anew with the answer; a hedge has none.
  if is_holder then redis.call('ZADD', slot.work, whole(now + a.lease_ms), member) end
  local outcome = is_holder and 'claimed' or 'hedged'
  return answer(outcome, open, claim.batch_id, batch, prompts, last.attempt, claim.claim)
end
local repeated = again()
if repeated then return repeated end
-- How many dead batches one claim buries: who has no attempts left stands before what is new, and the caller says how
-- many there are.
local MAX_BURIED = 256
local num_buried = 0
for _, open in ipairs(window) do
  local slot = slot_of(open.iteration)
  -- `take` removes nothing: each round of the loop leases the item, buries its batch or removes it from `work`, so that
  -- the next one finds another.
  local member, was_leased = take(slot)
  while member do
    local id = string.match(member, '^0/(.*)/0$') or ''
    local batch = batch_of(slot, id)
    local prompts = redis.call('HGET', slot.prompts, id)
    if batch.state == 'expected' and prompts then
      local last = claim_of(slot, member)
      if last.attempt < a.max_attempts then
        local unproved = proof_due(open, batch)
        if unproved then return unproved end
        note_reclaimed(was_leased)
        lease(slot, id, member, last, was_leased)
        return answer('claimed', open, id, batch, prompts, last.attempt, last.claim)
      end
      note_reclaimed(was_leased)
      bury(slot, id, batch, 'its generators died ' .. last.attempt .. ' times', last.attempt)
      num_buried = num_buried + 1
      if num_buried == MAX_BURIED then return { 'none', 1 } end
    else
      note_reclaimed(was_leased)
      redis.call('ZREM', slot.work, member)
    end
    member, was_leased = take(slot)
  end
end
local recent = a.may_hedge and unpacked(redis.call('HGET', PROGRESS, 'recent_ms')) or {}
if #recent == 0 then return nothing(-1) end
-- The median: the element in the middle, or the lower one of two.
table.sort(recent)
local due = -1
for _, open in ipairs(window) do
  local slot = slot_of(open.iteration)
  local id, last, prompts = oldest_of_others(slot)
  if id then
    -- A clock that stepped back must not make it wait for as long as the step.
    local left = math.min(last.claimed_ms, now) + LATE * recent[math.ceil(#recent / 2)] - now
    if left <= 0 then
      local batch = batch_of(slot, id)
      local unproved = proof_due(open, batch)
      if unproved then return unproved end
      redis.call('ZREM', slot.claims, id)
      last.hedger = a.generator
      last.hedge = new_claim()
      last.hedged_ms = now
      redis.call('HSET', slot.items, 'l/' .. member_of(0, id, 0), cmsgpack.pack(last))
      count('hedged')
      return answer('hedged', open, id, batch, prompts, last.attempt, last.hedge)
    end
    due = due < 0 and math.ceil(left) or math.min(due, math.ceil(left))
  end
end
return nothing(due)

-- renew: {leases}
-- Begins the leases of a worker anew.
--   leases   A list of {stage, iteration, batch_id, item, claim}; claim is the number of the claim.
--   -> {renewed, a word for each lease}
--      held      the lease is the worker's, and begins anew
--      lost      another worker has the item, or it was given back
--      settled   the item is done or dead, or its iteration or job over
-- A hedge's own mark keeps no lease alive.
-- Keys:
--   job             read: `state`; the leases of an ended job are settled
--   fence           read: the open iterations
--   items           read: l/ITEM, which claim holds the item, and for how long
--   work            written: the new end of a lease that is held; read: an item that is not there is settled
--   missing         removed: a worker that says something of its claim lives
--   onbeat:role:R   never there: the right to read it shows the caller's role
local out = { 'renewed' }
local fence = read_fence()
local ended = is_ended()
local now = now_ms()
local function renew(lease)
  local slot = slot_of(lease.iteration)
  local member = member_of(lease.stage, lease.batch_id, lease.item)
  local is_in_work = not ended and open_at(fence, lease.iteration) and redis.call('ZSCORE', slot.work, member)
  if not is_in_work then
    heard_of(lease.claim)
    return 'settled'
  end
  local last = claim_of(slot, member)
  -- A copy has no lease that could be renewed; it is needed as long as the batch is in work.
  if is_claim(last.hedge, lease.claim) then return 'held' end
  if not is_claim(last.claim, lease.claim) then
    heard_of(lease.claim)
    return 'lost'
  end
  redis.call('ZADD', slot.work, score_of(lease.stage, now + last.lease_ms), member)
  return 'held'
end
for _, lease in ipairs(a.leases) do
  require_worker_of(lease.stage)
  out[#out + 1] = renew(lease)
end
return out

-- prove_version: {generator, policy_version, weights_digest, kind}
-- Judges what a generator's engine computes with a version, by its log-probs of the version's probe (I11). A generator
-- that passes may claim batches of the version; one that passed before and doesn't now may not.
--   generator       The id of the generator.
--   policy_version  The version.
--   weights_digest  The digest of the weights that the engine has loaded.
--   kind            Engine and dtype: engines of a kind round alike, and the first one's gap bounds the others'.
--   payload         float32 [rows * scored tokens], the engine's log-probs
--   -> {proved|far|stale|not_finite, packed {gap, row, bound, k3, share, can_tell}}
--      see ProofVerdict of contracts/probes.py
--    | {unknown}   these weights are no version with a probe
-- Keys:
--   job        read: `state`; of an ended job nothing is proved
--   probes     read: the trainer's log-probs of the version and of the one before, and the bounds
--   proofs     read and written: `first KIND`; written: VERSION/GENERATOR; removed where the engine doesn't pass
--   counters   written: proved, proof_far, proof_stale, proof_not_finite, proof_cant_tell
require_number(a.policy_version, 0)
local version = whole(a.policy_version)
local of_version = redis.call('HMGET', PROBES, version, version .. '/logprobs', version .. '/before')
local packed, trainers_logprobs, logprobs_before = unpack(of_version)
local probe = unpacked(packed)
if is_ended() or not probe or not trainers_logprobs or probe.digest ~= a.weights_digest then return { 'unknown' } end
if type(a.generator) ~= 'string' or type(a.kind) ~= 'string' or #a.generator > MAX_WHO or #a.kind > MAX_WHO then
  return error('not a name')
end
local engine = payload()
if #engine ~= #trainers_logprobs then
  return error(#engine .. ' bytes of log-probs, and ' .. #trainers_logprobs .. ' are taken')
end
local FLOAT_BYTES = 4
local num = #engine / FLOAT_BYTES
-- A finite number of at least 0; NaN is unequal to itself.
local function is_size(number)
  return type(number) == 'number' and number >= 0 and number < math.huge
end
local function number_at(text, index)
  return (struct.unpack('<f', text, (index - 1) * FLOAT_BYTES + 1))
end
-- gap: the largest difference, as a share of one and the log-prob's own size. square: the sum of squared differences in
-- nats.
local gap = 0
local at = 1
local k3 = 0
local square = 0
local is_finite = true
-- The largest gap of each row, with the place that it is at.
local of_rows = {}
-- The engine's step from the version before, along the trainer's; and the trainer's own, squared.
local along = 0
local step = 0
for index = 1, num do
  local engines = number_at(engine, index)
  local trainers = number_at(trainers_logprobs, index)
  local difference = engines - trainers
  -- NaN is unequal to itself; of an infinite log-prob the difference is infinite.
  if difference ~= difference or math.abs(difference) == math.huge then
    is_finite = false
    at = index
    break
  end
  local share = math.abs(difference) / (1 + math.abs(trainers))
  if share > gap then
    gap = share
    at = index
  end
  local number = math.floor((index - 1) / probe.num_scored) + 1
  if not of_rows[number] or share > of_rows[number].gap then of_rows[number] = { gap = share, at = index } end
  -- Beyond e^700 a double is infinite.
  k3 = k3 + math.exp(math.min(difference, 700)) - 1 - difference
  square = square + difference * difference
  if logprobs_before then
    local before = number_at(logprobs_before, index)
    along = along + (engines - before) * (trainers - before)
    step = step + (trainers - before) * (trainers - before)
  end
end
local first_field = 'first ' .. a.kind
local first = unpacked(redis.call('HGET', PROOFS, first_field))
-- What another hand wrote there counts as absent: the next engine that passes is the first.
if first and not (is_size(first.gap) and is_size(first.noise)) then first = nil end
local bound = probe.limit
if first then
  bound = math.min(probe.limit, math.max(probe.floor, SLACK * first.gap))
  if probe.is_exact and first.gap == 0 then bound = 0 end
end
-- The noise of an engine: the root of its mean squared difference at its kind's first version, in nats, and never less
-- than a sixteenth of what rounding may make. `share` is uncertain by noise / sqrt(step), so a sixteenth is eight times
-- less than a half.
local noise = math.max(first and first.noise or math.sqrt(square / num), probe.floor / 16)
local can_tell = is_finite and logprobs_before ~= false and math.sqrt(step) > 16 * noise
local share = can_tell and along / step or 1
-- A row of a mixture of experts may be far off by itself: no more than half of the rows may be.
table.sort(of_rows, function(one, other) return one.gap < other.gap end)
local middle = of_rows[math.ceil(#of_rows / 2)]
local outcome = 'proved'
if not is_finite then
  outcome = 'not_finite'
elseif gap > bound then
  outcome = 'far'
elseif probe.typical and middle.gap > probe.typical then
  outcome = 'far'
  gap = middle.gap
  at = middle.at
  bound = probe.typical
elseif can_tell and share < 0.5 then
  -- Nearer to the version before than to this one.
  outcome = 'stale'
end
local field = proof_of(a.policy_version, a.generator)
if outcome == 'proved' then
  -- Who is forgotten so proves once more. The first gaps of kinds stay, unless it is they that are too many.
  if redis.call('HLEN', PROOFS) >= MAX_CLAIMERS and redis.call('HEXISTS', PROOFS, field) == 0 then
    for _, proof in ipairs(of_versions(redis.call('HKEYS', PROOFS), 0, math.huge)) do
      redis.call('HDEL', PROOFS, proof)
    end
    if redis.call('HLEN', PROOFS) >= MAX_CLAIMERS then redis.call('DEL', PROOFS) end
  end
  if not first then redis.call('HSET', PROOFS, first_field, cmsgpack.pack({ gap = gap, noise = noise })) end
  redis.call('HSET', PROOFS, field, a.weights_digest)
  count('proved')
  if logprobs_before and not can_tell then count('proof_cant_tell') end
else
  redis.call('HDEL', PROOFS, field)
  count('proof_' .. outcome)
end
local row = math.floor((at - 1) / probe.num_scored)
local verdict = { gap = gap, row = row, bound = bound, k3 = k3 / num, share = share, can_tell = can_tell }
return { outcome, cmsgpack.pack(verdict) }

-- publish_batch: {batch_id, iteration, policy_version, weights_digest, shape, digest, generator, attempt, claim,
--   max_bytes, num_rounds, stages, max_waiting, engine}
-- Publishes a batch, once: the fence refuses one of another version, iteration or content (I1, I2, I3).
--   batch_id        The batch.
--   iteration       Its iteration.
--   policy_version  The version that sampled it.
--   weights_digest  The digest of the weights that sampled it.
--   shape           PROMPTSxSAMPLES; it has to be the ledger's.
--   digest          The digest of the batch.
--   generator       The generator that sampled it.
--   attempt         The attempt of its claim.
--   claim           The number of its claim.
--   max_bytes       Most bytes of the payload.
--   num_rounds      Rounds in which it was sampled.
--   stages          The job's stages, which it passes before it is trained; none of an evaluation, or without stages.
--   max_waiting     Most rows that may wait for columns.
--   engine          The kind of the generator's engine, where the job is deterministic.
--   payload         RolloutBatch
--   -> {accepted}
--    | {ended|stale|future|wrong_weights|unproved|wrong_engine|unexpected|duplicate|incomplete|oversize|closed}
--      a refusal, which is counted by its reason
--    | {full, rows that wait for columns}
--    | {no_room, bytes that are missing}
--    | OOM, at maxmemory
-- A repeat by the publisher whose answer was lost is accepted again, and writes nothing.
-- Memory goes by age: what the oldest iteration needs for its commit, which alone frees any, is kept from the younger
-- ones.
-- Keys:
--   job               read: `state`; an ended job takes nothing
--   fence             read: the open iterations, the digests of their versions, and `version_bytes`
--   probes, proofs    read: whether the generator's engine has shown what it computes with the version (I11)
--   ledger            read: what the fence expects of the batch; written: `published`
--   progress          read and written: engine, largest, recent_ms, published:S, waiting:S
--   rollouts          written: the entry that the trainer reads, in a job without stages
--   items             read: l/ITEM, to know a hedge; written: b/BATCH_ID in a job with stages; removed: l/ITEM
--   work              written: items of the first stages; removed: the batch
--   prompts, claims   removed: the batch is settled
--   missing           written: another holder of the batch; removed: the publisher's claim
--   waiting           removed: the stage workers that are woken
--   counters          written: accepted, accepted_bytes, rejected:REASON, hedges_won, lost
--   onbeat:wake:W     channel: calls a stage worker that waits
require_number(a.num_rounds, 1)
require_number(a.claim, 1, MAX_CLAIM)
local fence = read_fence()
heard_of(a.claim)
local function refuse(reason)
  -- A job that was removed has no fence.
  if fence.epoch then count('rejected:' .. reason) end -- of a job that was removed nothing comes back
  return { reason }
end
local function rows_waiting()
  local sum = 0
  -- The rows of all open iterations together: a stage works on each of them.
  for index = 0, num_slots() - 1 do sum = sum + (tonumber(redis.call('HGET', PROGRESS, 'waiting:' .. index)) or 0) end
  return sum
end
-- What the oldest iteration lacks: its batches, as large as any yet, with columns as large where there are any, one
-- more on its way, and a version.
local function needed_by_oldest(largest)
  local oldest = fence.window[1]
  local settled = progress(slot_of(oldest.iteration))
  local left = math.max(0, oldest.expected - settled.published - settled.dead)
  local of_version = tonumber(redis.call('HGET', FENCE, 'version_bytes')) or 0
  -- In bytes. Each stage may add columns as large as the batch itself: an upper estimate, on the safe side.
  return left * largest * (1 + (a.stages and #a.stages or 0)) + largest + of_version
end
-- Makes the batch wait for its columns: what reads no other stage's is free at once.
local function stage(slot, published, rollouts)
  local rows = num_rows(a)
  published.entry = ''
  published.shape = a.shape
  published.left = 0
  published.staged_ms = now_ms()
  for number, each in ipairs(a.stages) do
    local num_items = rows / item_rows(each, a)
    -- Items of all stages: the batch is complete when none of them lacks columns.
    published.left = published.left + num_items
    if #each.after == 0 then
      set_free(slot, number, a.batch_id, 0, num_items - 1)
      wake(number, num_items)
    end
  end
  redis.call('HSET', slot.items, 'b/' .. a.batch_id, rollouts)
  redis.call('HINCRBY', PROGRESS, 'waiting:' .. slot.index, rows)
end
-- Notes another one that holds the batch as it is settled; those whose leases have ended since they were noted are
-- counted.
local function note_missing(slot, last)
  local ends_ms = tonumber(redis.call('ZSCORE', slot.work, member_of(0, a.batch_id, 0)))
  -- Below 1 the score is a free turn, and no generator holds the batch.
  if not last.claim or last.worker == a.generator or not ends_ms or ends_ms < 1 then return end
  local num_lost = redis.call('ZREMRANGEBYSCORE', MISSING, '-inf', whole(now_ms()))
  if num_lost > 0 then count('lost', num_lost) end
  redis.call('ZADD', MISSING, whole(ends_ms), whole(last.claim))
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
-- I2: the version lies in the range of the iteration, and its weights are those that were announced.
if a.policy_version < oldest then return refuse('stale') end
if a.policy_version > newest then return refuse('future') end
if a.weights_digest ~= digest_of(fence, a.policy_version) then return refuse('wrong_weights') end
-- I11: the engine has shown that it computes with these weights as the trainer does.
if not is_proved(a.policy_version, a.weights_digest, a.generator) then return refuse('unproved') end
local of_slot = 'published:' .. slot.index
local engine, known, recent_ms, num_published =
  unpack(redis.call('HMGET', PROGRESS, 'engine', 'largest', 'recent_ms', of_slot))
if is_other_engine(engine or nil, a.engine) then return refuse('wrong_engine') end
-- The same bytes under the same attempt: the publisher whose answer was lost. Anything else is a second copy (I3).
if batch.state == 'published' then
  local is_repeat = batch.digest == a.digest and batch.generator == a.generator and batch.attempt == a.attempt
  if is_repeat then return { 'accepted' } end
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
  -- Where the oldest iteration's commit frees more than its own batches, they go past the limit. What of them that is
  -- was kept free when the younger ones came; where an estimate was short, or the limit was lowered, it is little.
  require_room(fence.window, 2)
end
local last = claim_of(slot, member_of(0, a.batch_id, 0))
local is_hedge = last.hedger == a.generator
-- False where the publisher lost its lease to another one: its time is unknown, and doesn't go into the median.
local claimed_ms = is_hedge and last.hedged_ms or (last.worker == a.generator and last.claimed_ms)
local published = {
  state = 'published',
  digest = a.digest,
  generator = a.generator,
  attempt = a.attempt,
  version = batch.version,
}
if a.stages then
  stage(slot, published, rollouts)
else
  published.entry =
    redis.call('XADD', slot.rollouts, '*', 'batch', rollouts, 'batch_id', a.batch_id, 'digest', a.digest)
end
keep_engine(engine, a.engine)
local recent = unpacked(recent_ms) or {}
if claimed_ms then
  -- ms for each round of sampling, never negative where a clock stepped back; the newest comes first, and beyond RECENT
  -- the oldest goes.
  table.insert(recent, 1, math.floor(math.max(0, now_ms() - claimed_ms) / a.num_rounds))
  recent[RECENT + 1] = nil
end
num_published = (tonumber(num_published) or 0) + 1
redis.call('HSET', PROGRESS, of_slot, num_published, 'largest', whole(largest), 'recent_ms', cmsgpack.pack(recent))
write_batch(slot, a.batch_id, published)
note_missing(slot, last)
drop_prompt(slot, a.batch_id)
if is_hedge then count('hedges_won') end
count('accepted')
count('accepted_bytes', #rollouts)
return { 'accepted' }

-- fail_batch: {lease, max_attempts, reason, is_released, fault}
-- Gives a prompt batch back, or buries it after its last attempt (I6).
--   lease         {stage, iteration, batch_id, item, claim}, as in `renew`.
--   max_attempts  Claims of one batch, after which it is buried.
--   reason        Why it failed; the ledger has it of a dead batch.
--   is_released   True where the fault was not the batch's: the attempt doesn't count.
--   fault         The words of an exception that no code of ours raised, or ''. By the same ones it fails once again,
--                 and no more.
--   -> {retried} | {dead} | {released} | {settled}   see `give_back`
-- Keys:
--   job, fence              read: an ended job and a closed iteration are settled
--   ledger                  read: the state of the batch, and how many there are; written: `dead`, after its last
--                           attempt
--   items                   read and written: l/ITEM, the claim without its holder
--   work                    written: the turn of the batch, behind all that were sent before; removed where it is dead
--   claims, missing         removed: the claim is over
--   prompts                 removed, where the batch is dead
--   dead, buried            written: a batch after its last attempt
--   progress                written: dead:S, and `setback`: which batch failed last, where, why
--   waiting                 removed: the generator that is woken for a batch that is free again
--   counters                written: failed, released, dead
--   onbeat:role:generator   never there: the right to read it shows the caller's role
local slot = slot_of(a.lease.iteration)
local id = a.lease.batch_id
local outcome, batch, attempts, why =
  give_back(a.lease, 'expected', '%s', a.max_attempts, a.is_released, a.reason, a.fault)
if outcome == 'dead' then
  bury(slot, id, batch, why, attempts)
elseif outcome ~= 'settled' then
  -- Behind all batches of the ledger: a batch that fails doesn't keep the others waiting.
  redis.call('ZADD', slot.work, turn_behind(redis.call('HLEN', slot.ledger)), member_of(0, id, 0))
  redis.call('ZREM', slot.claims, id)
  wake(0, 1)
end
return { outcome }
