-- fail_batch: {lease, max_attempts, reason, is_released}; lease: {stage, iteration, batch_id, item, claim}, as of `renew`
--   -> {retried} | {dead} | {released} | {settled}: see `give_back`
local slot, id = slot_of(a.lease.iteration), a.lease.batch_id
local outcome, batch, attempts = give_back(a.lease, 'expected', '%s', a.max_attempts, a.is_released)
if outcome == 'dead' then
  bury(slot, id, batch, a.reason, attempts)
elseif outcome ~= 'settled' then
  redis.call('ZADD', slot.work, turn_behind(redis.call('HLEN', slot.ledger)), member_of(0, id, 0))
  redis.call('ZREM', slot.claims, id)
end
return { outcome }
