-- claim_rollouts: ARGV epoch, consumer, max, take over ('1' the first time: what a dead trainer held)
--   -> {claimed, dead count, last entry id, n x (entry, payload, digest)} | {fenced}
if not is_trainer(ARGV[1]) then return { 'fenced' } end
group(ROLLOUTS, 'trainers')
local out = { 'claimed', tonumber(fence('dead')) or 0, '' }
local function add(entries)
  for _, entry in ipairs(entries) do
    if entry[2] then
      out[#out + 1] = entry[1]
      out[#out + 1] = entry[2][2]
      out[#out + 1] = entry[2][6]
    end
  end
end
if ARGV[4] == '1' then
  add(redis.call('XAUTOCLAIM', ROLLOUTS, 'trainers', ARGV[2], '0', '0', 'COUNT', '10000')[2])
end
local fresh = redis.call('XREADGROUP', 'GROUP', 'trainers', ARGV[2], 'COUNT', ARGV[3], 'STREAMS', ROLLOUTS, '>')
if fresh then add(fresh[1][2]) end
out[3] = last_id(ROLLOUTS)
return out
