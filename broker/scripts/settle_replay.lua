-- settle_replay: {replay_id, generator, attempt, state, digest, reason}
--   -> {settled} | {lost}
-- state: done, failed, or queued where the generator leaves it to another: then the attempt doesn't count.
-- A generator whose lease went to another is refused: the other one answers.
local ENDS = { done = true, failed = true, queued = true }
if not ENDS[a.state] or type(a.digest) ~= 'string' or type(a.reason) ~= 'string' then return error('not an answer') end
local one = replay_of(a.replay_id, redis.call('HGET', REPLAYS, a.replay_id))
if not one or one.state ~= 'sampling' or one.generator ~= a.generator or one.attempt ~= a.attempt then return { 'lost' } end
one.state, one.digest, one.reason, one.lease_ms = a.state, string.sub(a.digest, 1, 256), string.sub(a.reason, 1, 2000), 0
if a.state == 'queued' then one.attempt, one.generator = one.attempt - 1, '' end
redis.call('HSET', REPLAYS, a.replay_id, cmsgpack.pack(one))
return { 'settled' }
