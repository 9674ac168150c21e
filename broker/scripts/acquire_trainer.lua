-- acquire_trainer: ARGV owner, lease_ms -> {acquired, epoch} | {held, ms left}
-- The epoch comes from the clock as well, so that a lost second of writes can't hand one out twice.
local owner, lease_ms = ARGV[1], tonumber(ARGV[2])
local now = now_ms()
local left = (tonumber(fence('lease_until')) or 0) - now
local mine = fence('owner') == owner
if left > 2 * lease_ms and not mine then
  -- The clock stepped back: a holder that lives says so within a lease, a dead one must not hold for as long as the step.
  left = lease_ms
  redis.call('HSET', FENCE, 'lease_until', string.format('%.0f', now + lease_ms))
end
if left > 0 and not mine then return { 'held', left } end
local epoch = tonumber(fence('epoch')) or 0
if not mine then epoch = math.max(epoch + 1, now) end
redis.call('HSET', FENCE, 'epoch', string.format('%.0f', epoch), 'owner', owner,
  'lease_until', string.format('%.0f', now + lease_ms), 'lease_ms', lease_ms)
return { 'acquired', string.format('%.0f', epoch) }
