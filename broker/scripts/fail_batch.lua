-- fail_batch: ARGV batch id, entry, generator, attempt, max attempts, reason -> {retried} | {dead} | {settled}
-- Only the lease's holder may fail it: who lost it, or works on a copy, would take the work away from the holder.
local state = redis.call('HGET', LEDGER, ARGV[1])
if not state or split(state)[1] ~= 'expected' or split(state)[2] ~= ARGV[2] then return { 'settled' } end
local entry = redis.call('XRANGE', PROMPTS, ARGV[2], ARGV[2])[1]
local pending = lease(ARGV[2])
if not entry or not pending or pending[2] ~= ARGV[3] then return { 'settled' } end
local attempt = tonumber(entry[2][4]) + pending[4] - 1
if attempt ~= tonumber(ARGV[4]) then return { 'settled' } end
count('failed')
if attempt >= tonumber(ARGV[5]) then
  bury(ARGV[1], ARGV[2], ARGV[6])
  return { 'dead' }
end
local again = redis.call('XADD', PROMPTS, '*', 'batch', entry[2][2], 'attempt', attempt + 1, 'batch_id', ARGV[1])
redis.call('HSET', LEDGER, ARGV[1], 'expected:' .. again .. ':' .. split(state)[3])
drop_prompt(ARGV[2])
redis.call('ZREM', CLAIMS, ARGV[1])
return { 'retried' }
