-- reconcile: ARGV epoch, iteration, n x batch id
--   -> {whole} | {lost, n x batch id: those of the asked that are nowhere} | {fenced} | {wrong_iteration, iteration}
-- Writes nothing. An iteration is whole when its counts agree, and then its batches aren't looked at: a trainer that waits
-- asks every other second, of any number of batches.
if not is_trainer(ARGV[1]) then return { 'fenced' } end
if fence('state') ~= 'open' or fence('iteration') ~= ARGV[2] then return { 'wrong_iteration', fence('iteration') } end
local expected, settled = tonumber(fence('expected')), redis.call('HMGET', PROGRESS, 'published', 'dead')
local left = expected - tonumber(settled[1] or 0) - tonumber(settled[2] or 0)
if redis.call('HLEN', LEDGER) == expected and redis.call('XLEN', PROMPTS) == left then return { 'whole' } end
local out = { 'lost' }
for i = 3, #ARGV do
  if is_lost(ARGV[i]) then out[#out + 1] = ARGV[i] end
end
return out
