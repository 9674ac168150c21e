-- open_iteration: {epoch, opening}; opening: see the prelude; payloads a PromptBatch of each of opening.batches
--   -> {opened} | {already_open} | {fenced} | {out_of_order, committed} | {no_manifest}
if not is_trainer() then return { 'fenced' } end
local fence = read_fence()
local is_same = is_open_at(fence, a.opening.iteration) and fence.open.digest == a.opening.weights_digest
if is_same and fence.open.is_readable then return { 'already_open' } end
if (fence.open and not is_same) or not follows(a.opening, fence.committed) then return { 'out_of_order', fence.committed } end
if not is_announced(a.opening) then return { 'no_manifest' } end
if is_same then clear_iteration() end
open(a.opening)
return { 'opened' }
