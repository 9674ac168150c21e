-- commit_iteration: ARGV epoch, iteration, audit record, its digest, the digest that it follows, event or '', n trained,
--   n x (batch id, digest), then '' or what open() takes
--   -> {committed} | {already_committed} | {fenced} | {wrong_iteration, iteration} | {broken_link} | {missing, batch id}
--    | {divergent, batch id} | {out_of_order, iteration} | {no_manifest}
if not is_trainer(ARGV[1]) then return { 'fenced' } end
local iteration = tonumber(ARGV[2])
if (tonumber(fence('committed')) or -1) >= iteration then return { 'already_committed' } end
if fence('state') ~= 'open' or fence('iteration') ~= ARGV[2] then return { 'wrong_iteration', fence('iteration') } end
if not is_linked(ARGV[5]) then return { 'broken_link' } end
local n = tonumber(ARGV[7])
local trained = {}
for i = 0, n - 1 do trained[ARGV[8 + 2 * i]] = ARGV[9 + 2 * i] end
local ledger = redis.call('HGETALL', LEDGER)
-- Batches of an opening that never came: who lacks them can't have trained them.
if #ledger / 2 ~= tonumber(fence('expected')) then return { 'missing', 'dispatch' } end
for i = 1, #ledger, 2 do
  local id, parts = ledger[i], split(ledger[i + 1])
  if parts[1] ~= 'dead' then
    if not trained[id] then return { 'missing', id } end
    if parts[1] == 'published' and parts[3] ~= trained[id] then return { 'divergent', id } end
  elseif trained[id] then
    return { 'divergent', id }
  end
  trained[id] = nil
end
local extra = next(trained)
if extra then return { 'divergent', extra } end
local at = 8 + 2 * n
local opens = ARGV[at] and ARGV[at] ~= ''
if opens and not follows(at, iteration) then return { 'out_of_order', ARGV[at] } end
if opens and not is_announced(at) then return { 'no_manifest' } end
clear_iteration()
redis.call('XADD', AUDIT, '*', 'record', ARGV[3], 'digest', ARGV[4])
redis.call('HSET', FENCE, 'committed', iteration, 'state', 'closed')
if ARGV[6] ~= '' then tell(ARGV[6]) end
if opens then open(at) end
return { 'committed' }
