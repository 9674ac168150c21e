-- renew_replay: KEYS[1] replays; {replay_id, generator, attempt, lease_ms}
--   -> {renewed} | {lost}
local REPLAYS = KEYS[1]
local text = redis.call('HGET', REPLAYS, a.replay_id)
local one = text and unpacked(text)
if not one or one.state ~= 'sampling' or one.generator ~= a.generator or one.attempt ~= a.attempt then return { 'lost' } end
one.lease_ms = now_ms() + a.lease_ms
redis.call('HSET', REPLAYS, a.replay_id, cmsgpack.pack(one))
return { 'renewed' }
