-- renew_rows: {lease_ms, items}; items: of {stage, iteration, batch_id, item, claim}
--   -> {renewed, n x (held | lost | settled)}
-- lost: another worker holds it, or it was failed; settled: it has its columns, its batch is dead, its iteration or job over.
require_number(a.lease_ms, 1)
local fence, has_ended, now = read_fence(), is_ended(), now_ms()
local function renew(item)
  local slot = staged_item(fence, item)
  if has_ended or not slot then return 'settled' end
  local member = member_of(item.stage, item.batch_id, item.item)
  if not redis.call('ZSCORE', slot.work, member) then return 'settled' end
  local last = claims_of(slot, { member })[1]
  if not is_claim(last.claim, item.claim) then return 'lost' end
  redis.call('ZADD', slot.work, whole(item.stage * BAND + now + a.lease_ms), member)
  return 'held'
end
local out = { 'renewed' }
for _, item in ipairs(a.items) do out[#out + 1] = renew(item) end
return out
