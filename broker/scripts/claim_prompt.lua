-- claim_prompt: {generator, lease_ms, max_attempts, may_hedge, max_rounds}; max_rounds: most rounds that a batch may take
--   -> {claimed|hedged, entry, attempt, payload, manifest}
--    | {none, last entry id, ms until a batch has taken long enough for a hedge, or -1}
-- An expired lease comes first: the oldest work holds the iteration up (I5). Then what is new. A generator that finds
-- neither may hedge: work on a copy of another's oldest batch; the first publication wins (I3). A batch is hedged once,
-- and not after it lost a holder: it may be the batch that kills, and would kill two generators at each attempt.
local fence = read_fence()
if not fence.open or is_ended() then return { 'none', last_id(PROMPTS), -1 } end
local now = now_ms()
-- A batch is late when its rounds take this many times the median of the latest: at 1, every second one would be. Which
-- round its holder is in isn't known here, so a batch gets the time of all that it may need.
local LATE = 1.5 * a.max_rounds
-- The next prompt, with its deliveries; nil where there is none.
local function take()
  -- Not XAUTOCLAIM: it looks at ten pending entries only, and live leases would hide an expired one behind them.
  local expired = redis.call('XPENDING', PROMPTS, 'generators', 'IDLE', whole(a.lease_ms), '-', '+', '1')[1]
  if expired then
    local id, deliveries = expired[1], expired[4]
    local reclaimed = redis.call('XCLAIM', PROMPTS, 'generators', a.generator, whole(a.lease_ms), id)[1]
    if reclaimed then
      count('reclaimed')
      return entry_of(reclaimed), deliveries + 1
    end
  end
  local fresh = redis.call('XREADGROUP', 'GROUP', 'generators', a.generator, 'COUNT', '1', 'STREAMS', PROMPTS, '>')
  if fresh then return entry_of(fresh[1][2][1]), 1 end
end
local function answer(outcome, prompt, attempt)
  return { outcome, prompt.id, attempt, prompt.batch, redis.call('HGET', WEIGHTS, fence.open.version) }
end
local function is_expected(batch, prompt)
  return batch.state == 'expected' and batch.entry == prompt.id
end
-- A hedge of the lease before goes on beside the new holder, unless that is the hedger itself.
local function note_claim(prompt, deliveries)
  local batch = batch_of(prompt.batch_id)
  if not is_expected(batch, prompt) then return end
  batch.holder, batch.claimed_ms = a.generator, now
  if batch.hedger == a.generator then batch.hedger, batch.hedged_ms = nil, nil end
  write_batch(prompt.batch_id, batch)
  if deliveries == 1 then redis.call('ZADD', CLAIMS, whole(now), prompt.batch_id) else redis.call('ZREM', CLAIMS, prompt.batch_id) end
end
-- Passes over what the asker itself holds, and nothing else: the oldest of the others is near the front of the index.
local AT_ONCE = 16
local function oldest_of_others()
  local from = 0
  while true do
    local ids = redis.call('ZRANGE', CLAIMS, from, from + AT_ONCE - 1)
    for _, id in ipairs(ids) do
      local batch = batch_of(id)
      local copied = batch.holder and batch.holder ~= a.generator and redis.call('XRANGE', PROMPTS, batch.entry, batch.entry)[1]
      if copied then return id, batch, entry_of(copied) end
    end
    if #ids < AT_ONCE then return nil end
    from = from + AT_ONCE
  end
end
while true do
  local prompt, deliveries = take()
  if not prompt then break end
  local attempt = tonumber(prompt.attempt) + deliveries - 1
  if attempt <= a.max_attempts then
    note_claim(prompt, deliveries)
    return answer('claimed', prompt, attempt)
  end
  if is_expected(batch_of(prompt.batch_id), prompt) then
    bury(prompt.batch_id, prompt.id, 'its generators died ' .. (attempt - 1) .. ' times')
  end
  drop_prompt(prompt.id)
end
local recent = a.may_hedge and progress().recent_ms or {}
if #recent == 0 then return { 'none', last_id(PROMPTS), -1 } end
local id, batch, copied = oldest_of_others()
if not id then return { 'none', last_id(PROMPTS), -1 } end
table.sort(recent)
-- A clock that stepped back must not make it wait for as long as the step.
local left = math.min(batch.claimed_ms, now) + LATE * recent[math.ceil(#recent / 2)] - now
if left > 0 then return { 'none', last_id(PROMPTS), math.ceil(left) } end
redis.call('ZREM', CLAIMS, id)
batch.hedger, batch.hedged_ms = a.generator, now
write_batch(id, batch)
count('hedged')
-- What may be hedged has been delivered once.
return answer('hedged', copied, tonumber(copied.attempt))
