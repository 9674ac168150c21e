-- reconcile: ARGV epoch, iteration, n x (batch id, shape, payload)
--   -> {dispatched, how many} | {fenced} | {wrong_iteration, iteration}
-- After a restart that lost the last writes: an expected batch that is nowhere is put on the stream again.
if not is_trainer(ARGV[1]) then return { 'fenced' } end
if fence('state') ~= 'open' or fence('iteration') ~= ARGV[2] then return { 'wrong_iteration', fence('iteration') } end
group(PROMPTS, 'generators')
local again = 0
for i = 3, #ARGV, 3 do
  local state = redis.call('HGET', LEDGER, ARGV[i])
  local parts = state and split(state) or {}
  local lost = not state or (parts[1] == 'expected' and #redis.call('XRANGE', PROMPTS, parts[2], parts[2]) == 0)
  if lost then
    local entry = redis.call('XADD', PROMPTS, '*', 'batch', ARGV[i + 2], 'attempt', '1', 'batch_id', ARGV[i])
    redis.call('HSET', LEDGER, ARGV[i], 'expected:' .. entry .. ':' .. ARGV[i + 1])
    redis.call('ZREM', CLAIMS, ARGV[i])
    again = again + 1
  end
end
if again > 0 then count('redispatched', again) end
return { 'dispatched', again }
