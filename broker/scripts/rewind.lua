-- rewind: ARGV epoch, next iteration, audit record -> {rewound} | {fenced}
-- The trainer resumes from a checkpoint that is older than the fence: what came after is done again under this epoch.
if not is_trainer(ARGV[1]) then return { 'fenced' } end
clear_iteration()
redis.call('HSET', FENCE, 'committed', tonumber(ARGV[2]) - 1, 'iteration', tonumber(ARGV[2]) - 1, 'state', 'closed')
redis.call('XADD', AUDIT, '*', 'record', ARGV[3])
count('rewinds')
return { 'rewound' }
