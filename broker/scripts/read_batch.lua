-- read_batch: {iteration, batch_id, digest} -> {read, RolloutBatch} | {gone}: other content stands there by now, or none
-- A batch that stages read, where it stands beside its columns: a large one is not copied into a claim.
local slot = slot_of(a.iteration)
local batch = batch_of(slot, a.batch_id)
local rollouts = batch.state == 'published' and batch.digest == a.digest and redis.call('HGET', slot.columns, 'b/' .. a.batch_id)
if not rollouts then return { 'gone' } end
return { 'read', rollouts }
