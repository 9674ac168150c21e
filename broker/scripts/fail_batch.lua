-- fail_batch: ARGV batch id, entry, generator, attempt, max attempts, reason -> {retried} | {dead} | {settled}
local state = redis.call('HGET', LEDGER, ARGV[1])
if not state or split(state)[1] ~= 'expected' or split(state)[2] ~= ARGV[2] then return { 'settled' } end
local entry = redis.call('XRANGE', PROMPTS, ARGV[2], ARGV[2])[1]
if not entry then return { 'settled' } end
count('failed')
if tonumber(ARGV[4]) >= tonumber(ARGV[5]) then
  bury(ARGV[1], ARGV[2], ARGV[6], entry[2][2])
  return { 'dead' }
end
local again = redis.call('XADD', PROMPTS, '*', 'batch', entry[2][2], 'attempt', ARGV[4] + 1)
redis.call('HSET', LEDGER, ARGV[1], 'expected:' .. again .. ':' .. split(state)[3])
drop_prompt(ARGV[2])
return { 'retried' }
