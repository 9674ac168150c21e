-- commit_iteration: {epoch, iteration, digest, previous, trained, made, opening, engine}
--   digest, previous: of the audit record, and of the one that it follows; trained: batch id -> digest; made: the version
--   {version, digest} that the iteration has made, or none; opening: see the prelude, or none;
--   engine: the kind that sampled what this trainer was given, of a deterministic job; payloads AuditRecord, JobEvent
--   or '', then a PromptBatch of each of opening.batches
--   -> {committed} | {already_committed} | {fenced} | {wrong_iteration, oldest open} | {broken_link} | {missing, batch id}
--    | {divergent, batch id} | {out_of_order, newest iteration} | {no_manifest}
--    | {wrong_engine, the kind that samples the job}: a restart has forgotten the first one, and another came
local fence = read_fence()
if not is_its_trainer(fence) then return { 'fenced' } end
if fence.committed >= a.iteration then return { 'already_committed' } end
local oldest = table.remove(fence.window, 1)
if not oldest or oldest.iteration ~= a.iteration then return { 'wrong_iteration', oldest and oldest.iteration or fence.committed } end
if a.previous ~= last_link() then return { 'broken_link' } end
local kept = engine_of_job()
if is_other_engine(kept, a.engine) then return { 'wrong_engine', kept } end
local slot = slot_of(a.iteration)
local ledger = redis.call('HGETALL', slot.ledger)
-- Batches of an opening that never came: a trainer that lacks them can't have trained them.
if #ledger / 2 ~= oldest.expected then return { 'missing', 'dispatch' } end
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
fence.committed = a.iteration
local is_in_order = (not a.made or a.made.version == a.iteration + 1) and (not a.opening or is_next(fence, a.opening))
if not is_in_order then return { 'out_of_order', newest_iteration(fence) } end
local fault = a.made and add_version(fence, a.made)
if fault then return { fault, newest_iteration(fence) } end
if a.opening and not is_samplable(fence, a.opening) then return { 'no_manifest' } end
local record, event = payload(), payload()
keep_engine(kept, a.engine)
clear_slot(slot)
redis.call('XADD', AUDIT, '*', 'record', record, 'digest', a.digest)
if event ~= '' then tell(event) end
if a.opening then open(fence, a.opening) end
write_fence(fence)
return { 'committed' }
