-- reconcile: {epoch, iteration, batch_ids}
--   -> {whole} | {lost, n x batch id: those of the asked that are nowhere} | {fenced} | {wrong_iteration, newest iteration}
-- Writes nothing. An iteration is whole when its counts agree, and then its batches aren't looked at: a trainer that waits
-- asks every other second, of any number of batches.
local fence = read_fence()
if not is_its_trainer(fence) then return { 'fenced' } end
local open = open_at(fence, a.iteration)
if not open then return { 'wrong_iteration', newest_iteration(fence) } end
local slot = slot_of(a.iteration)
local settled = progress(slot)
local left = open.expected - settled.published - settled.dead
local num_there = redis.call('ZCOUNT', slot.work, 0, score_of(1, -1))
if redis.call('HLEN', slot.ledger) == open.expected and num_there == left then return { 'whole' } end
local out = { 'lost' }
for _, id in ipairs(a.batch_ids) do
  if is_lost(slot, id) then out[#out + 1] = id end
end
return out
