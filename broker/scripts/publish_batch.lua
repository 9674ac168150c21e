-- publish_batch: ARGV batch id, iteration, version, digest, shape, batch digest, generator, attempt, max bytes, payload, rounds
--   -> {accepted} | {ended|stale|future|wrong_weights|unexpected|duplicate|incomplete|oversize|closed, 1 if it is counted}
-- A repeat by the publisher whose answer was lost is accepted again, and writes nothing.
local id, iteration, version = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
-- A refusal is answered at maxmemory too, where this script may not count: its caller counts it then.
local function refuse(reason)
  if redis.call('EXISTS', FENCE) == 0 then return { reason, 1 } end -- of a job that was removed nothing comes back
  local counted = redis.pcall('HINCRBY', COUNTERS, 'rejected:' .. reason, 1)
  return { reason, type(counted) == 'number' and 1 or 0 }
end
local state, current, open_version, digest = unpack(redis.call('HMGET', FENCE, 'state', 'iteration', 'version', 'digest'))
if is_ended() then return refuse('ended') end
current, open_version = tonumber(current or '-1'), tonumber(open_version or '-1')
if iteration < current then return refuse('stale') end
if iteration > current then return refuse('future') end
if state ~= 'open' then return refuse('closed') end
if version < open_version then return refuse('stale') end
if version > open_version then return refuse('future') end
if ARGV[4] ~= digest then return refuse('wrong_weights') end
local entry_state = redis.call('HGET', LEDGER, id)
if not entry_state then return refuse('unexpected') end
local parts = split(entry_state)
if parts[1] == 'published' then
  if parts[3] == ARGV[6] and parts[4] == ARGV[7] and parts[5] == ARGV[8] then return { 'accepted' } end
  return refuse('duplicate')
end
if parts[1] == 'dead' then return refuse('unexpected') end
if parts[3] ~= ARGV[5] then return refuse('incomplete') end
if #ARGV[10] > tonumber(ARGV[9]) then return refuse('oversize') end
local held = lease(parts[2])
local is_hedge = parts[5] == ARGV[7]
local claimed_ms = is_hedge and parts[6] or (held and held[2] == ARGV[7] and parts[4])
local entry = redis.call('XADD', ROLLOUTS, '*', 'batch', ARGV[10], 'batch_id', id, 'digest', ARGV[6])
redis.call('HSET', LEDGER, id, table.concat({ 'published', entry, ARGV[6], ARGV[7], ARGV[8] }, ':'))
drop_prompt(parts[2])
redis.call('ZREM', CLAIMS, id)
redis.call('HINCRBY', PROGRESS, 'published', 1)
if claimed_ms then
  local recent = recent_ms()
  table.insert(recent, 1, math.floor(math.max(0, now_ms() - claimed_ms) / tonumber(ARGV[11])))
  redis.call('HSET', PROGRESS, 'recent_ms', table.concat(recent, ',', 1, math.min(#recent, RECENT)))
end
if is_hedge then count('hedges_won') end
count('accepted')
count('accepted_bytes', #ARGV[10])
return { 'accepted' }
