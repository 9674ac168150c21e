-- renew_trainer: ARGV epoch, lease_ms (0 gives the lease back) -> {renewed, job state} | {fenced}
if not is_trainer(ARGV[1]) then return { 'fenced' } end
redis.call('HSET', FENCE, 'lease_until', string.format('%.0f', now_ms() + tonumber(ARGV[2])))
if ARGV[2] == '0' then redis.call('HSET', FENCE, 'lease_until', '0', 'owner', '') end
return { 'renewed', redis.call('HGET', JOB, 'state') or '' }
