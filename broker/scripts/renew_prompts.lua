-- renew_prompts: {claims}; claims: of {batch_id, iteration, number} -> {renewed, n x (held | lost | settled)}
-- A hedge holds its own mark, and keeps no lease of the original alive. settled: published, given up, or its iteration or
-- job is over.
local function renew(claim)
  local slot = slot_of(claim.iteration)
  local batch = batch_of(slot, claim.batch_id)
  if batch.state ~= 'expected' then return 'settled' end
  if is_claim(batch.hedge, claim.number) then return 'held' end
  if not is_claim(batch.claim, claim.number) then return 'lost' end
  local renewed = redis.call('XCLAIM', slot.prompts, 'generators', batch.holder, '0', batch.entry, 'JUSTID')
  return renewed[1] and 'held' or 'lost'
end
local out, ended = { 'renewed' }, is_ended()
for _, claim in ipairs(a.claims) do out[#out + 1] = ended and 'settled' or renew(claim) end
return out
