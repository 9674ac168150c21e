-- commit_iteration: {epoch, iteration, digest, previous, trained, opening}
--   digest, previous: of the audit record, and of the one that it follows; trained: batch id -> digest; opening: see the
--   prelude, or none; payloads AuditRecord, JobEvent or '', then a PromptBatch of each of opening.batches
--   -> {committed} | {already_committed} | {fenced} | {wrong_iteration, iteration} | {broken_link} | {missing, batch id}
--    | {divergent, batch id} | {out_of_order, iteration} | {no_manifest}
if not is_trainer() then return { 'fenced' } end
local fence = read_fence()
if fence.committed >= a.iteration then return { 'already_committed' } end
if not is_open_at(fence, a.iteration) then return { 'wrong_iteration', fence.iteration } end
if a.previous ~= last_link() then return { 'broken_link' } end
local ledger = redis.call('HGETALL', LEDGER)
-- Batches of an opening that never came: a trainer that lacks them can't have trained them.
if #ledger / 2 ~= fence.open.expected then return { 'missing', 'dispatch' } end
local trained = a.trained
for i = 1, #ledger, 2 do
  local id, batch = ledger[i], unpacked(ledger[i + 1]) or {}
  if batch.state ~= 'dead' then
    if not trained[id] then return { 'missing', id } end
    if batch.state == 'published' and batch.digest ~= trained[id] then return { 'divergent', id } end
  elseif trained[id] then
    return { 'divergent', id }
  end
  trained[id] = nil
end
local extra = next(trained)
if extra then return { 'divergent', extra } end
if a.opening and not follows(a.opening, a.iteration) then return { 'out_of_order', a.opening.iteration } end
if a.opening and not is_announced(a.opening) then return { 'no_manifest' } end
local record, event = payload(), payload()
clear_iteration()
redis.call('XADD', AUDIT, '*', 'record', record, 'digest', a.digest)
redis.call('HSET', FENCE, 'committed', a.iteration, 'state', 'closed')
if event ~= '' then tell(event) end
if a.opening then open(a.opening) end
return { 'committed' }
