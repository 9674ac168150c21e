-- renew_rows: {items}; items: of {stage, iteration, batch_id, item, claim} -> {renewed, n x (held | lost | settled)}: see `renew`
local out, fence, ended, now = { 'renewed' }, read_fence(), is_ended(), now_ms()
for _, item in ipairs(a.items) do
  local slot = staged_item(fence, item)
  local member = member_of(item.stage, item.batch_id, item.item)
  out[#out + 1] = (ended or not slot) and 'settled' or renew(slot, item.stage, member, item.claim, now)
end
return out
