-- drop_chunks: KEYS[13] chunks; ARGV epoch, oldest version kept, older versions that stay... -> {dropped, n} | {fenced}
if not is_trainer(ARGV[1]) then return { 'fenced' } end
local stays = {}
for i = 3, #ARGV do stays[ARGV[i]] = true end
local dropped = 0
for _, field in ipairs(redis.call('HKEYS', KEYS[13])) do
  local version = string.match(field, '^%d+')
  if tonumber(version) < tonumber(ARGV[2]) and not stays[version] then
    dropped = dropped + redis.call('HDEL', KEYS[13], field)
  end
end
return { 'dropped', dropped }
