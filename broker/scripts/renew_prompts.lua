-- renew_prompts: ARGV generator, n x (batch id, entry) -> {renewed, n x (held | lost | settled)}
-- A hedge holds its own mark, and keeps no lease of the original alive. settled: published, given up, or its iteration or job is over.
local function renew(id, entry)
  local held = lease(entry)
  if held and held[2] == ARGV[1] then
    redis.call('XCLAIM', PROMPTS, 'generators', ARGV[1], '0', entry, 'JUSTID')
    return 'held'
  end
  local parts = split(redis.call('HGET', LEDGER, id) or 'gone')
  if parts[1] ~= 'expected' then return 'settled' end
  if parts[2] ~= entry or parts[5] ~= ARGV[1] then return 'lost' end
  return 'held'
end
local out, ended = { 'renewed' }, is_ended()
for i = 2, #ARGV, 2 do out[#out + 1] = ended and 'settled' or renew(ARGV[i], ARGV[i + 1]) end
return out
