-- claim_prompt: ARGV generator, lease_ms, max_attempts
--   -> {claimed, entry, attempt, payload, manifest} | {none, last entry id}
-- An expired lease comes first: the oldest work holds the iteration up (I5).
if fence('state') ~= 'open' then return { 'none', last_id(PROMPTS) } end
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
while true do
  local entry = take()
  if not entry then break end
  local id, fields = entry[1], entry[2]
  local deliveries = redis.call('XPENDING', PROMPTS, 'generators', id, id, '1')[1][4]
  local attempt = tonumber(fields[4]) + deliveries - 1
  if attempt <= tonumber(ARGV[3]) then
    return { 'claimed', id, attempt, fields[2], redis.call('HGET', WEIGHTS, fence('version')) }
  end
  local ledger = redis.call('HGETALL', LEDGER)
  for i = 1, #ledger, 2 do
    if split(ledger[i + 1])[2] == id then bury(ledger[i], id, 'its generators died ' .. (attempt - 1) .. ' times', fields[2]) end
  end
  drop_prompt(id)
end
return { 'none', last_id(PROMPTS) }
