-- acquire_trainer: {owner, lease_ms, sealed} -> {acquired, epoch} | {held, ms left} | {no_group, reason} | {unknown}
-- sealed: the number of the hosts whose ranks it leads, 0 where one host has all: it must be that of those that stand.
-- The epoch comes from the clock as well, so that a lost second of writes can't hand one out twice.
if redis.call('EXISTS', JOB) == 0 then return { 'unknown' } end
local hosts, now = standing_hosts(), now_ms()
if hosts.sealed ~= a.sealed then return { 'no_group', hosts.reason } end
local last_epoch, owner, lease_until = unpack(redis.call('HMGET', FENCE, 'epoch', 'owner', 'lease_until'))
local left = (tonumber(lease_until) or 0) - now
local is_mine = owner == a.owner
if left > 2 * a.lease_ms and not is_mine then
  -- The clock stepped back: a holder that lives says so within a lease, a dead one must not hold for as long as the step.
  left = a.lease_ms
  redis.call('HSET', FENCE, 'lease_until', whole(now + a.lease_ms))
end
if left > 0 and not is_mine then return { 'held', left } end
local epoch = tonumber(last_epoch) or 0
if not is_mine then epoch = math.max(epoch + 1, now) end
redis.call('HSET', FENCE, 'epoch', whole(epoch), 'owner', a.owner, 'lease_until', whole(now + a.lease_ms),
  'lease_ms', whole(a.lease_ms), 'num_slots', whole(num_slots()))
return { 'acquired', whole(epoch) }
