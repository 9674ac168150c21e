-- open_iteration: {epoch, opening, versions}; opening: see the prelude; versions: of {version, digest}, those that may sample
--   the window; payloads a PromptBatch of each of opening.batches
--   -> {opened} | {already_open} | {fenced} | {out_of_order, newest iteration} | {no_manifest}
local fence = read_fence()
if not is_its_trainer(fence) then return { 'fenced' } end
local stands = open_at(fence, a.opening.iteration)
local is_same = stands and stands.oldest_version == a.opening.oldest_version
for _, made in ipairs(a.versions) do
  local known = digest_of(fence, made.version)
  is_same = is_same and (known == nil or known == made.digest)
end
if is_same then return { 'already_open' } end
if not is_next(fence, a.opening) then return { 'out_of_order', newest_iteration(fence) } end
for _, made in ipairs(a.versions) do
  local fault = add_version(fence, made)
  if fault then return { fault, newest_iteration(fence) } end
end
if not is_samplable(fence, a.opening) then return { 'no_manifest' } end
-- An older Onbeat may have left its iteration there.
clear_slot(slot_of(a.opening.iteration))
open(fence, a.opening)
write_fence(fence)
return { 'opened' }
