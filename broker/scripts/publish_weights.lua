-- publish_weights: {epoch, policy_version, oldest_kept, chunk_bytes}, payload WeightManifest
--   -> {published} | {fenced} | {divergent, the digest that this version has}
-- chunk_bytes: of the version, in Redis; what the next one is expected to need there.
-- What may sample the window stays, also where a trainer counts on commits that a restart has lost: a claim must find it.
local fence = read_fence()
if not is_its_trainer(fence) then return { 'fenced' } end
local manifest, known = payload(), digest_of(fence, a.policy_version)
-- A restart may have lost the rewind of a trainer that lives, and which has made this version anew with other weights.
if known and not string.find(manifest, known, 1, true) then return { 'divergent', known } end
redis.call('HSET', WEIGHTS, a.policy_version, manifest)
redis.call('HSET', FENCE, 'version_bytes', whole(a.chunk_bytes))
local oldest = math.min(a.oldest_kept, fence.window[1] and fence.window[1].oldest_version or a.oldest_kept)
for _, version in ipairs(redis.call('HKEYS', WEIGHTS)) do
  if tonumber(version) < oldest then redis.call('HDEL', WEIGHTS, version) end
end
return { 'published' }
