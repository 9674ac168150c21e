-- renew: {leases}; leases: of {stage, iteration, batch_id, item, claim}; claim: the number of the claim
--   -> {renewed, n x (held | lost: another has it, or it was given back | settled: it is done or dead)}
-- A hedge's own mark keeps no lease alive.
local out, fence, ended, now = { 'renewed' }, read_fence(), is_ended(), now_ms()
local function renew(lease)
  local slot, member = slot_of(lease.iteration), member_of(lease.stage, lease.batch_id, lease.item)
  local is_in_work = not ended and open_at(fence, lease.iteration) and redis.call('ZSCORE', slot.work, member)
  if not is_in_work then return 'settled' end
  local last = claim_of(slot, member)
  if is_claim(last.hedge, lease.claim) then return 'held' end
  if not is_claim(last.claim, lease.claim) then return 'lost' end
  redis.call('ZADD', slot.work, score_of(lease.stage, now + last.lease_ms), member)
  return 'held'
end
for _, lease in ipairs(a.leases) do
  require_worker_of(lease.stage)
  out[#out + 1] = renew(lease)
end
return out
