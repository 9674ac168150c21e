-- dispatch: ARGV epoch, iteration, n, n x (batch id, shape, payload)
--   -> {dispatched, how many} | {fenced} | {wrong_iteration, iteration}
-- What an opening had no room for, and what a restart has lost: an expected batch that is nowhere goes on the stream.
if not is_trainer(ARGV[1]) then return { 'fenced' } end
if fence('state') ~= 'open' or fence('iteration') ~= ARGV[2] then return { 'wrong_iteration', fence('iteration') } end
group(PROMPTS, 'generators')
local dispatched, again = 0, 0
for i = 4, #ARGV, 3 do
  local known = redis.call('HEXISTS', LEDGER, ARGV[i]) == 1
  if is_lost(ARGV[i]) then
    expect(ARGV[i], ARGV[i + 1], ARGV[i + 2])
    redis.call('ZREM', CLAIMS, ARGV[i])
    dispatched = dispatched + 1
    if known then again = again + 1 end
  end
end
if again > 0 then count('redispatched', again) end
return { 'dispatched', dispatched }
