-- settle_replay: KEYS[1] replays; {replay_id, generator, attempt, state, digest, reason}
--   -> {settled} | {lost}
-- state: done, failed, or queued where the generator leaves it to another: then the attempt doesn't count.
-- A generator whose lease went to another is refused: the other one answers.
local REPLAYS = KEYS[1]
local one = replay_of(a.replay_id, redis.call('HGET', REPLAYS, a.replay_id))
if not one or one.state ~= 'sampling' or one.generator ~= a.generator or one.attempt ~= a.attempt then return { 'lost' } end
one.state, one.digest, one.reason, one.lease_ms = a.state, a.digest, a.reason, 0
if a.state == 'queued' then one.attempt, one.generator = one.attempt - 1, '' end
redis.call('HSET', REPLAYS, a.replay_id, cmsgpack.pack(one))
return { 'settled' }
