-- fail_rows: {stages, failed, max_attempts, reason, is_released};
--   failed: {stage, iteration, batch_id, item, claim} -> {retried} | {dead} | {released} | {settled}
-- Only its last claim may fail an item; past the attempts its batch is dead (I6). is_released: as fail_batch has it.
local item = a.failed
local slot, batch = staged_item(read_fence(), item)
if not slot or is_ended() then return { 'settled' } end
local member = member_of(item.stage, item.batch_id, item.item)
local last = claims_of(slot, { member })[1]
if not is_claim(last.claim, item.claim) or not redis.call('ZSCORE', slot.work, member) then return { 'settled' } end
count((a.is_released and 'stage_released:' or 'stage_failed:') .. item.stage)
if last.attempt >= a.max_attempts and not a.is_released then
  bury_staged(slot, item.batch_id, batch, a.stages, a.reason, last.attempt)
  return { 'dead' }
end
local given_back = { worker = '', attempt = a.is_released and last.attempt - 1 or last.attempt, claimed_ms = last.claimed_ms }
redis.call('HSET', slot.columns, 'l/' .. member, cmsgpack.pack(given_back))
set_free(slot, item.stage, item.batch_id, item.item, item.item)
wake('ready')
return { a.is_released and 'released' or 'retried' }
