-- claim_prompt: ARGV generator, lease_ms, max_attempts, hedge (1 or 0), most rounds that a batch may take
--   -> {claimed|hedged, entry, attempt, payload, manifest}
--    | {none, last entry id, ms until a batch has taken long enough for a hedge, or -1}
-- An expired lease comes first: the oldest work holds the iteration up (I5). Then what is new. Who finds neither may
-- hedge: work on a copy of the oldest batch of somebody else; the first publication wins (I3). A batch is hedged once,
-- and not after it lost a holder: it may be the batch that kills, and would kill two generators at each attempt.
if fence('state') ~= 'open' or is_ended() then return { 'none', last_id(PROMPTS), -1 } end
local now = now_ms()
-- A batch is late when its rounds take this many times the median of the latest: at 1, every second one would be. Which
-- round its holder is in isn't known here, so a batch gets the time of all that it may need.
local LATE = 1.5 * tonumber(ARGV[5])
local function take()
  -- Not XAUTOCLAIM: it looks at ten pending entries only, and live leases would hide an expired one behind them.
  local expired = redis.call('XPENDING', PROMPTS, 'generators', 'IDLE', ARGV[2], '-', '+', '1')[1]
  if expired then
    local reclaimed = redis.call('XCLAIM', PROMPTS, 'generators', ARGV[1], ARGV[2], expired[1])
    if reclaimed[1] then
      count('reclaimed')
      return reclaimed[1]
    end
  end
  local fresh = redis.call('XREADGROUP', 'GROUP', 'generators', ARGV[1], 'COUNT', '1', 'STREAMS', PROMPTS, '>')
  return fresh and fresh[1][2][1]
end
local function answer(outcome, entry, deliveries)
  local fields = entry[2]
  return { outcome, entry[1], tonumber(fields[4]) + deliveries - 1, fields[2], redis.call('HGET', WEIGHTS, fence('version')) }
end
-- A hedge of the lease before goes on beside the new holder, unless that is the hedger itself.
local function note_claim(id, entry, deliveries)
  local parts = split(redis.call('HGET', LEDGER, id) or 'gone')
  if parts[1] ~= 'expected' or parts[2] ~= entry then return end
  parts[4] = string.format('%.0f', now)
  if parts[5] == ARGV[1] then parts = { unpack(parts, 1, 4) } end
  redis.call('HSET', LEDGER, id, table.concat(parts, ':'))
  if deliveries == 1 then redis.call('ZADD', CLAIMS, parts[4], id) else redis.call('ZREM', CLAIMS, id) end
end
-- Passes over what the asker itself holds, and nothing else: the oldest of the others is near the front of the index.
local AT_ONCE = 16
local function oldest_of_others()
  local from = 0
  while true do
    local ids = redis.call('ZRANGE', CLAIMS, from, from + AT_ONCE - 1)
    for _, id in ipairs(ids) do
      local parts = split(redis.call('HGET', LEDGER, id))
      local held = lease(parts[2])
      local copied = held and held[2] ~= ARGV[1] and redis.call('XRANGE', PROMPTS, parts[2], parts[2])[1]
      if copied then return id, parts, copied, held[4] end
    end
    if #ids < AT_ONCE then return nil end
    from = from + AT_ONCE
  end
end
while true do
  local entry = take()
  if not entry then break end
  local id, fields = entry[1], entry[2]
  local deliveries = lease(id)[4]
  local taken = answer('claimed', entry, deliveries)
  if taken[3] <= tonumber(ARGV[3]) then
    note_claim(fields[6], id, deliveries)
    return taken
  end
  local parts = split(redis.call('HGET', LEDGER, fields[6]) or 'gone')
  if parts[1] == 'expected' and parts[2] == id then
    bury(fields[6], id, 'its generators died ' .. (taken[3] - 1) .. ' times')
  end
  drop_prompt(id)
end
local recent = recent_ms()
if ARGV[4] ~= '1' or #recent == 0 then return { 'none', last_id(PROMPTS), -1 } end
local id, parts, copied, deliveries = oldest_of_others()
if not id then return { 'none', last_id(PROMPTS), -1 } end
table.sort(recent)
-- A clock that stepped back must not make it wait for as long as the step.
local left = math.min(tonumber(parts[4]), now) + LATE * recent[math.ceil(#recent / 2)] - now
if left > 0 then return { 'none', last_id(PROMPTS), math.ceil(left) } end
local at = string.format('%.0f', now)
redis.call('ZREM', CLAIMS, id)
redis.call('HSET', LEDGER, id, table.concat({ parts[1], parts[2], parts[3], parts[4], ARGV[1], at }, ':'))
count('hedged')
return answer('hedged', copied, deliveries)
