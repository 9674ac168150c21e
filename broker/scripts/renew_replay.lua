-- renew_replay: KEYS[1] replays; {replay_id, generator, attempt, lease_ms}
--   -> {renewed} | {lost}
local REPLAYS = KEYS[1]
local one = replay_of(a.replay_id, redis.call('HGET', REPLAYS, a.replay_id))
if not one or one.state ~= 'sampling' or one.generator ~= a.generator or one.attempt ~= a.attempt then return { 'lost' } end
one.lease_ms = now_ms() + a.lease_ms
redis.call('HSET', REPLAYS, a.replay_id, cmsgpack.pack(one))
return { 'renewed' }
