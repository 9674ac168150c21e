-- claim_rollouts: ARGV epoch, consumer, max, last entry that this trainer holds ('0-0': none, it takes over),
--   the n entries after it that this trainer has read while it waited: their payloads, megabytes each, come as ''
--   -> {claimed, dead count, n x (entry, payload, digest)} | {fenced}
-- A repeat after a lost answer gives the same again: what is pending after the last entry comes before what is new.
if not is_trainer(ARGV[1]) then return { 'fenced' } end
local out = { 'claimed', tonumber(redis.call('HGET', PROGRESS, 'dead') or 0) }
if redis.call('EXISTS', ROLLOUTS) == 0 then return out end
local last, left = ARGV[4], tonumber(ARGV[3])
local function add(from)
  if left <= 0 then return end
  local read = redis.call('XREADGROUP', 'GROUP', 'trainers', ARGV[2], 'COUNT', left, 'STREAMS', ROLLOUTS, from)
  for _, entry in ipairs(read and read[1][2] or {}) do
    if entry[2] then
      out[#out + 1] = entry[1]
      out[#out + 1] = entry[2][2]
      out[#out + 1] = entry[2][6]
      left = left - 1
    end
  end
end
if last == '0-0' then
  redis.call('XAUTOCLAIM', ROLLOUTS, 'trainers', ARGV[2], '0', '0', 'COUNT', '10000', 'JUSTID')
end
-- As XREADGROUP would deliver them, without a look at their payloads.
for i = 5, math.min(#ARGV, 4 + left) do
  local id = ARGV[i]
  local there = redis.call('XCLAIM', ROLLOUTS, 'trainers', ARGV[2], '0', id, 'FORCE', 'JUSTID', 'LASTID', id)
  if there[1] then
    for _, item in ipairs({ id, '', '' }) do out[#out + 1] = item end
    last, left = id, left - 1
  end
end
add(last)
add('>')
return out
