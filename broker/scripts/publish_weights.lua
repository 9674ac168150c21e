-- publish_weights: {epoch, policy_version, oldest_kept}, payload WeightManifest -> {published} | {fenced}
-- What may sample the window stays, also where a trainer counts on commits that a restart has lost: a claim must find it.
local fence = read_fence()
if not is_its_trainer(fence) then return { 'fenced' } end
redis.call('HSET', WEIGHTS, a.policy_version, payload())
local oldest = math.min(a.oldest_kept, fence.window[1] and fence.window[1].oldest_version or a.oldest_kept)
for _, version in ipairs(redis.call('HKEYS', WEIGHTS)) do
  if tonumber(version) < oldest then redis.call('HDEL', WEIGHTS, version) end
end
return { 'published' }
