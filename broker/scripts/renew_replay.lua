-- renew_replay: {replay_id, generator, attempt, lease_ms}
--   -> {renewed} | {lost}
require_number(a.lease_ms, 0)
local one = replay_of(a.replay_id, redis.call('HGET', REPLAYS, a.replay_id))
if not one or one.state ~= 'sampling' or one.generator ~= a.generator or one.attempt ~= a.attempt then return { 'lost' } end
one.lease_ms = now_ms() + a.lease_ms
redis.call('HSET', REPLAYS, a.replay_id, cmsgpack.pack(one))
return { 'renewed' }
