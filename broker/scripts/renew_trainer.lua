-- renew_trainer: {epoch, lease_ms}; lease_ms: 0 gives the lease back -> {renewed, job state} | {fenced}
if not is_trainer() then return { 'fenced' } end
if a.lease_ms == 0 then
  redis.call('HSET', FENCE, 'lease_until', '0', 'owner', '')
else
  redis.call('HSET', FENCE, 'lease_until', whole(now_ms() + a.lease_ms))
end
return { 'renewed', redis.call('HGET', JOB, 'state') or '' }
