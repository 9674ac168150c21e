-- fail_batch: {batch_id, iteration, claim, max_attempts, reason, is_released}; claim: the number of the claim
--   -> {retried} | {dead} | {released} | {settled}
-- Only the claim that holds the lease may fail it: one that lost it, or is of a copy, would take the work from the holder.
-- is_released: it comes back as if it had not been claimed, for the fault was not the batch's: the attempt doesn't count (I6).
local slot = slot_of(a.iteration)
local batch = batch_of(slot, a.batch_id)
if batch.state ~= 'expected' or not is_claim(batch.claim, a.claim) then return { 'settled' } end
local row = redis.call('XRANGE', slot.prompts, batch.entry, batch.entry)[1]
if not row then return { 'settled' } end
local prompt, attempt = entry_of(row), batch.attempt
count(a.is_released and 'released' or 'failed')
if attempt >= a.max_attempts and not a.is_released then
  bury(slot, a.batch_id, batch, a.reason, attempt, prompt.batch)
  return { 'dead' }
end
local next_attempt = a.is_released and attempt or attempt + 1
local again = redis.call('XADD', slot.prompts, '*', 'batch', prompt.batch, 'attempt', next_attempt, 'batch_id', a.batch_id)
write_batch(slot, a.batch_id, { state = 'expected', entry = again, shape = batch.shape, version = batch.version })
drop_prompt(slot, batch.entry)
redis.call('ZREM', slot.claims, a.batch_id)
return { a.is_released and 'released' or 'retried' }
