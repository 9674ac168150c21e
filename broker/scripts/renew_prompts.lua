-- renew_prompts: {claims}; claims: of {batch_id, iteration, number} -> {renewed, n x (held | lost | settled)}: see `renew`
local out, ended, now = { 'renewed' }, is_ended(), now_ms()
for _, claim in ipairs(a.claims) do
  local slot = slot_of(claim.iteration)
  out[#out + 1] = ended and 'settled' or renew(slot, 0, member_of(0, claim.batch_id, 0), claim.number, now)
end
return out
