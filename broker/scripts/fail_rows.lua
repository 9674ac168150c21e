-- fail_rows: {lease, stages, max_attempts, reason, is_released}; lease: as of `renew`
--   -> {retried} | {dead} | {released} | {settled}: see `give_back`
local slot, stage, id, item = slot_of(a.lease.iteration), a.lease.stage, a.lease.batch_id, a.lease.item
local outcome, batch, attempts = give_back(a.lease, 'published', 'stage_%s:' .. stage, a.max_attempts, a.is_released)
if outcome == 'dead' then
  bury_staged(slot, id, batch, a.stages, a.reason, attempts)
elseif outcome ~= 'settled' then
  set_free(slot, stage, id, item, item)
  wake('ready')
end
return { outcome }
