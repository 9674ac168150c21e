-- fail_batch: {batch_id, iteration, claim, max_attempts, reason, is_released}; claim: the number of the claim
--   -> {retried} | {dead} | {released} | {settled}: see `give_back`
local slot = slot_of(a.iteration)
local batch = batch_of(slot, a.batch_id)
if batch.state ~= 'expected' then return { 'settled' } end
local item = { stage = 0, batch_id = a.batch_id, item = 0, claim = a.claim }
local outcome, attempts = give_back(slot, item, '%s', a.max_attempts, a.is_released)
if outcome == 'dead' then
  bury(slot, a.batch_id, batch, a.reason, attempts)
elseif outcome ~= 'settled' then
  set_free_prompt(slot, a.batch_id)
  redis.call('ZREM', slot.claims, a.batch_id)
end
return { outcome }
