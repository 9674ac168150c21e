-- claim_rollouts: ARGV epoch, consumer, max, last entry that this trainer holds ('0-0': none, it takes over),
--   n entries that it has read while it waited: their payloads, megabytes each, come as ''
--   -> {claimed, dead count, n x (entry, payload, digest)} | {fenced}
-- A repeat after a lost answer gives the same again: what is pending after the last entry comes before what is new.
if not is_trainer(ARGV[1]) then return { 'fenced' } end
group(ROLLOUTS, 'trainers')
local out = { 'claimed', tonumber(fence('dead')) or 0 }
local left = tonumber(ARGV[3])
local known = {}
for i = 5, #ARGV do known[ARGV[i]] = true end
local function add(from)
  if left <= 0 then return end
  local read = redis.call('XREADGROUP', 'GROUP', 'trainers', ARGV[2], 'COUNT', left, 'STREAMS', ROLLOUTS, from)
  for _, entry in ipairs(read and read[1][2] or {}) do
    if entry[2] then
      out[#out + 1] = entry[1]
      out[#out + 1] = known[entry[1]] and '' or entry[2][2]
      out[#out + 1] = entry[2][6]
      left = left - 1
    end
  end
end
if ARGV[4] == '0-0' then
  redis.call('XAUTOCLAIM', ROLLOUTS, 'trainers', ARGV[2], '0', '0', 'COUNT', '10000', 'JUSTID')
end
add(ARGV[4])
add('>')
return out
