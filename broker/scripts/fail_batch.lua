-- fail_batch: {batch_id, iteration, entry, generator, attempt, max_attempts, reason, is_released}
--   -> {retried} | {dead} | {released} | {settled}
-- Only the lease's holder may fail it: a generator that lost it, or works on a copy, would take the work from the holder.
-- is_released: it comes back as if it had not been claimed, for the fault was not the batch's: the attempt doesn't count (I6).
local slot = slot_of(a.iteration)
local batch = batch_of(slot, a.batch_id)
if batch.state ~= 'expected' or batch.entry ~= a.entry then return { 'settled' } end
local row, pending = redis.call('XRANGE', slot.prompts, a.entry, a.entry)[1], lease(slot, a.entry)
if not row or not pending or pending.holder ~= a.generator then return { 'settled' } end
local prompt = entry_of(row)
local attempt = tonumber(prompt.attempt) + pending.deliveries - 1
if attempt ~= a.attempt then return { 'settled' } end
count(a.is_released and 'released' or 'failed')
if attempt >= a.max_attempts and not a.is_released then
  bury(slot, a.batch_id, batch, a.reason, attempt, prompt.batch)
  return { 'dead' }
end
local next_attempt = a.is_released and attempt or attempt + 1
local again = redis.call('XADD', slot.prompts, '*', 'batch', prompt.batch, 'attempt', next_attempt, 'batch_id', a.batch_id)
write_batch(slot, a.batch_id, { state = 'expected', entry = again, shape = batch.shape, version = batch.version })
drop_prompt(slot, a.entry)
redis.call('ZREM', slot.claims, a.batch_id)
return { a.is_released and 'released' or 'retried' }
