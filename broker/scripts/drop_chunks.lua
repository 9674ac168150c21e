-- drop_chunks: {epoch, oldest_kept, kept}; kept: older versions that stay -> {dropped, n} | {fenced}
local CHUNKS = job_key('chunks')
if not is_trainer() then return { 'fenced' } end
local stays = {}
for _, version in ipairs(a.kept) do stays[version] = true end
local dropped = 0
for _, field in ipairs(redis.call('HKEYS', CHUNKS)) do
  local version = tonumber(string.match(field, '^%d+'))
  if version < a.oldest_kept and not stays[version] then
    dropped = dropped + redis.call('HDEL', CHUNKS, field)
  end
end
return { 'dropped', dropped }
