-- fail_rows: {stages, failed, max_attempts, reason, is_released};
--   failed: {stage, iteration, batch_id, item, claim} -> {retried} | {dead} | {released} | {settled}: see `give_back`
local item = a.failed
local slot, batch = staged_item(read_fence(), item)
if not slot or is_ended() then return { 'settled' } end
local outcome, attempts = give_back(slot, item, 'stage_%s:' .. item.stage, a.max_attempts, a.is_released)
if outcome == 'dead' then
  bury_staged(slot, item.batch_id, batch, a.stages, a.reason, attempts)
elseif outcome ~= 'settled' then
  set_free(slot, item.stage, item.batch_id, item.item, item.item)
  wake('ready')
end
return { outcome }
