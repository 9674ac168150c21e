-- rewind: ARGV epoch, next iteration, audit record, its digest, the digest that it follows
--   -> {rewound} | {already_rewound} | {fenced} | {out_of_order, committed} | {broken_link}
-- The trainer resumes from a checkpoint that is older than the fence: what came after is done again under this epoch.
if not is_trainer(ARGV[1]) then return { 'fenced' } end
local committed, before = tonumber(fence('committed')) or -1, tonumber(ARGV[2]) - 1
local last = redis.call('XREVRANGE', AUDIT, '+', '-', 'COUNT', '1')[1]
if last and last[2][4] == ARGV[4] and fence('state') == 'closed' and committed == before then
  return { 'already_rewound' }
end
if before > committed then return { 'out_of_order', committed } end
if not is_linked(ARGV[5]) then return { 'broken_link' } end
clear_iteration()
redis.call('HSET', FENCE, 'committed', before, 'iteration', before, 'state', 'closed')
redis.call('XADD', AUDIT, '*', 'record', ARGV[3], 'digest', ARGV[4])
count('rewinds')
return { 'rewound' }
