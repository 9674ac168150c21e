-- claim_prompt: ARGV generator, lease_ms, max_attempts, hedge (1 or 0), most rounds that a batch may take
--   -> {claimed|hedged, entry, attempt, payload, manifest}
--    | {none, last entry id, ms until a batch has taken long enough for a hedge, or -1}
-- An expired lease comes first: the oldest work holds the iteration up (I5). Then what is new. Who finds neither may
-- hedge: work on a copy of the oldest batch of somebody else; the first publication wins (I3). A batch is hedged once,
-- and not after it lost a holder: it may be the batch that kills, and would kill two generators at each attempt.
if fence('state') ~= 'open' then return { 'none', last_id(PROMPTS), -1 } end
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
local function note_claim(id, entry)
  local parts = split(redis.call('HGET', LEDGER, id) or 'gone')
  if parts[1] ~= 'expected' or parts[2] ~= entry then return end
  parts[4] = string.format('%.0f', now)
  if parts[5] == ARGV[1] then parts = { unpack(parts, 1, 4) } end
  redis.call('HSET', LEDGER, id, table.concat(parts, ':'))
end
local function oldest_of_others()
  local ledger, id, found = redis.call('HGETALL', LEDGER), nil, nil
  for i = 1, #ledger, 2 do
    local parts = split(ledger[i + 1])
    local claimed = parts[1] == 'expected' and tonumber(parts[4])
    if claimed and not parts[5] and (not found or claimed < tonumber(found[4])) then
      local held = lease(parts[2])
      if held and held[2] ~= ARGV[1] and held[4] == 1 then id, found = ledger[i], parts end
    end
  end
  return id, found
end
while true do
  local entry = take()
  if not entry then break end
  local id, fields = entry[1], entry[2]
  local taken = answer('claimed', entry, lease(id)[4])
  if taken[3] <= tonumber(ARGV[3]) then
    note_claim(fields[6], id)
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
local id, parts = oldest_of_others()
if not id then return { 'none', last_id(PROMPTS), -1 } end
table.sort(recent)
local left = tonumber(parts[4]) + LATE * recent[math.ceil(#recent / 2)] - now
if left > 0 then return { 'none', last_id(PROMPTS), math.ceil(left) } end
local at = string.format('%.0f', now)
redis.call('HSET', LEDGER, id, table.concat({ parts[1], parts[2], parts[3], parts[4], ARGV[1], at }, ':'))
count('hedged')
return answer('hedged', redis.call('XRANGE', PROMPTS, parts[2], parts[2])[1], lease(parts[2])[4])
