-- dispatch: {epoch, iteration, batches}; batches: of {id, shape, version}; payloads a PromptBatch of each
--   -> {dispatched, how many} | {fenced} | {wrong_iteration, newest iteration} | {no_manifest}
-- What an opening had no room for or no version yet, and what a restart has lost: an expected batch that is nowhere goes in
-- work.
local fence = read_fence()
if not is_its_trainer(fence) then return { 'fenced' } end
if not open_at(fence, a.iteration) then return { 'wrong_iteration', newest_iteration(fence) } end
if not are_versions_known(fence, a.batches) then return { 'no_manifest' } end
local slot = slot_of(a.iteration)
local lost, again = {}, 0
for _, batch in ipairs(a.batches) do
  batch.prompts = payload()
  if is_lost(slot, batch.id) then
    if redis.call('HEXISTS', slot.ledger, batch.id) == 1 then
      drop_prompt(slot, batch.id)
      again = again + 1
    end
    lost[#lost + 1] = batch
  end
end
expect(slot, lost)
if #lost > 0 then wake('dispatched') end
if again > 0 then count('redispatched', again) end
return { 'dispatched', #lost }
