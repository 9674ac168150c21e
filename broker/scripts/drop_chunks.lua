-- drop_chunks: KEYS[12] chunks; ARGV epoch, oldest version kept, older versions that stay... -> {dropped, n} | {fenced}
if not is_trainer(ARGV[1]) then return { 'fenced' } end
local stays = {}
for i = 3, #ARGV do stays[ARGV[i]] = true end
local dropped = 0
for _, field in ipairs(redis.call('HKEYS', KEYS[12])) do
  local version = string.match(field, '^%d+')
  if tonumber(version) < tonumber(ARGV[2]) and not stays[version] then
    dropped = dropped + redis.call('HDEL', KEYS[12], field)
  end
end
return { 'dropped', dropped }
