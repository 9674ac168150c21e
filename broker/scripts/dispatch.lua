-- dispatch: {epoch, iteration, batches}; batches: of {id, shape}; payloads a PromptBatch of each
--   -> {dispatched, how many} | {fenced} | {wrong_iteration, iteration}
-- What an opening had no room for, and what a restart has lost: an expected batch that is nowhere goes on the stream.
if not is_trainer() then return { 'fenced' } end
local fence = read_fence()
if not is_open_at(fence, a.iteration) then return { 'wrong_iteration', fence.iteration } end
group(PROMPTS, 'generators')
local dispatched, again = 0, 0
for _, batch in ipairs(a.batches) do
  local prompts = payload()
  local is_known = redis.call('HEXISTS', LEDGER, batch.id) == 1
  if is_lost(batch.id) then
    expect(batch, prompts)
    redis.call('ZREM', CLAIMS, batch.id)
    dispatched = dispatched + 1
    if is_known then again = again + 1 end
  end
end
if again > 0 then count('redispatched', again) end
return { 'dispatched', dispatched }
