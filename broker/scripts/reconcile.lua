-- reconcile: {epoch, iteration, batch_ids}
--   -> {whole} | {lost, n x batch id: those of the asked that are nowhere} | {fenced} | {wrong_iteration, iteration}
-- Writes nothing. An iteration is whole when its counts agree, and then its batches aren't looked at: a trainer that waits
-- asks every other second, of any number of batches.
if not is_trainer() then return { 'fenced' } end
local fence = read_fence()
if not is_open_at(fence, a.iteration) then return { 'wrong_iteration', fence.iteration } end
local expected, settled = fence.open.expected, progress()
local left = expected - settled.published - settled.dead
if redis.call('HLEN', LEDGER) == expected and redis.call('XLEN', PROMPTS) == left then return { 'whole' } end
local out = { 'lost' }
for _, id in ipairs(a.batch_ids) do
  if is_lost(id) then out[#out + 1] = id end
end
return out
