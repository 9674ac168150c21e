-- publish_weights: {epoch, policy_version, oldest_kept}, payload WeightManifest -> {published} | {fenced}
if not is_trainer() then return { 'fenced' } end
redis.call('HSET', WEIGHTS, a.policy_version, payload())
for _, version in ipairs(redis.call('HKEYS', WEIGHTS)) do
  if tonumber(version) < a.oldest_kept then redis.call('HDEL', WEIGHTS, version) end
end
return { 'published' }
