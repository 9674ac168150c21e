-- renew_prompts: {generator, claims}; claims: of {batch_id, iteration, entry} -> {renewed, n x (held | lost | settled)}
-- A hedge holds its own mark, and keeps no lease of the original alive. settled: published, given up, or its iteration or
-- job is over.
local function renew(claim)
  local slot = slot_of(claim.iteration)
  local held = lease(slot, claim.entry)
  if held and held.holder == a.generator then
    redis.call('XCLAIM', slot.prompts, 'generators', a.generator, '0', claim.entry, 'JUSTID')
    return 'held'
  end
  local batch = batch_of(slot, claim.batch_id)
  if batch.state ~= 'expected' then return 'settled' end
  if batch.entry ~= claim.entry or batch.hedger ~= a.generator then return 'lost' end
  return 'held'
end
local out, ended = { 'renewed' }, is_ended()
for _, claim in ipairs(a.claims) do out[#out + 1] = ended and 'settled' or renew(claim) end
return out
