-- claim_replay: {generator, lease_ms, max_attempts, left_alone}
--   -> {claimed, the entry packed} | {none}
-- The oldest request that waits, or whose generator let its lease run out; one that has cost max_attempts generators their
-- lives has failed. left_alone: ids of those that this generator can't serve.
require_number(a.lease_ms, 0)
local now, found, alone = now_ms(), nil, {}
for _, id in ipairs(a.left_alone) do alone[id] = true end
local all = redis.call('HGETALL', REPLAYS)
for i = 1, #all, 2 do
  local one = replay_of(all[i], all[i + 1])
  local is_free = one and (one.state == 'queued' or (one.state == 'sampling' and one.lease_ms < now)) and one.ends_ms > now
  if is_free and one.attempt >= a.max_attempts then
    one.state, one.reason = 'failed', 'its generators died, or hung, ' .. whole(one.attempt) .. ' times'
    redis.call('HSET', REPLAYS, all[i], cmsgpack.pack(one))
  elseif is_free and not alone[all[i]] and (not found or one.asked_ms < found.asked_ms) then
    found = one
  end
end
if not found then return { 'none' } end
found.state, found.generator, found.attempt, found.lease_ms = 'sampling', a.generator, found.attempt + 1, now + a.lease_ms
local entry = cmsgpack.pack(found)
redis.call('HSET', REPLAYS, found.replay_id, entry)
return { 'claimed', entry }
