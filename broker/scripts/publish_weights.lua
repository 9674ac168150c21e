-- publish_weights: ARGV epoch, version, manifest, oldest version kept -> {published} | {fenced}
if not is_trainer(ARGV[1]) then return { 'fenced' } end
redis.call('HSET', WEIGHTS, ARGV[2], ARGV[3])
for _, version in ipairs(redis.call('HKEYS', WEIGHTS)) do
  if tonumber(version) < tonumber(ARGV[4]) then redis.call('HDEL', WEIGHTS, version) end
end
return { 'published' }
