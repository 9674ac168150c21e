-- open_iteration: ARGV epoch, then what open() takes
--   -> {opened} | {already_open} | {fenced} | {out_of_order, committed} | {no_manifest}
if not is_trainer(ARGV[1]) then return { 'fenced' } end
if fence('state') == 'open' and fence('iteration') == ARGV[2] and fence('digest') == ARGV[4] then
  return { 'already_open' }
end
local committed = tonumber(fence('committed')) or -1
if fence('state') == 'open' or not follows(2, committed) then return { 'out_of_order', committed } end
if not is_announced(2) then return { 'no_manifest' } end
open(2)
return { 'opened' }
