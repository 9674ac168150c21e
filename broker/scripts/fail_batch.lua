-- fail_batch: {batch_id, entry, generator, attempt, max_attempts, reason} -> {retried} | {dead} | {settled}
-- Only the lease's holder may fail it: a generator that lost it, or works on a copy, would take the work from the holder.
local batch = batch_of(a.batch_id)
if batch.state ~= 'expected' or batch.entry ~= a.entry then return { 'settled' } end
local row, pending = redis.call('XRANGE', PROMPTS, a.entry, a.entry)[1], lease(a.entry)
if not row or not pending or pending.holder ~= a.generator then return { 'settled' } end
local prompt = entry_of(row)
local attempt = tonumber(prompt.attempt) + pending.deliveries - 1
if attempt ~= a.attempt then return { 'settled' } end
count('failed')
if attempt >= a.max_attempts then
  bury(a.batch_id, a.entry, a.reason)
  return { 'dead' }
end
local again = redis.call('XADD', PROMPTS, '*', 'batch', prompt.batch, 'attempt', attempt + 1, 'batch_id', a.batch_id)
write_batch(a.batch_id, { state = 'expected', entry = again, shape = batch.shape })
drop_prompt(a.entry)
redis.call('ZREM', CLAIMS, a.batch_id)
return { 'retried' }
