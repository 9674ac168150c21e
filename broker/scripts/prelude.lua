-- Shared head of every script. KEYS, the same for all:
--   1 fence     hash     epoch owner lease_until lease_ms iteration version digest state committed expected opened_ms
--   2 prompts   stream   field batch (PromptBatch), attempt, batch_id
--   3 rollouts  stream   field batch (RolloutBatch), batch_id, digest
--   4 ledger    hash     batch id -> expected:ENTRY:PROMPTSxGROUP[:CLAIMED_MS[:HEDGER:HEDGED_MS]]
--                                  | published:ENTRY:DIGEST:GENERATOR:ATTEMPT | dead:REASON
--   5 weights   hash     version -> WeightManifest
--   6 counters  hash
--   7 dead      stream
--   8 audit     stream   field record (AuditRecord), digest (the next record's `previous`)
--   9 job       hash     state reason created_s started_s ended_s ...
--  10 events    stream   field event (JobEvent), newest 10,000
--  11 progress  hash     published dead (of the open iteration) recent_ms: what generators move; the fence they only read
--  12 claims    zset     batch id -> ms of its claim: batches that may be hedged, those of a first holder without a hedge
-- A script may have more of its own, from the 13th on.
-- A script checks everything before it writes: scripts do not roll back. Each answers a list whose first item is its outcome.
local FENCE, PROMPTS, ROLLOUTS, LEDGER, WEIGHTS, COUNTERS, DEAD, AUDIT, JOB, EVENTS, PROGRESS, CLAIMS =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function fence(field)
  return redis.call('HGET', FENCE, field) or ''
end

local function group(stream, name)
  local made = redis.pcall('XGROUP', 'CREATE', stream, name, '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then
    return error(made.err)
  end
end

-- Only the holder of the newest epoch may move the fence (I4); who never acquired has none.
local function is_trainer(epoch)
  return epoch ~= '' and fence('epoch') == epoch
end

local function split(text)
  local parts = {}
  for part in string.gmatch(text, '[^:]+') do parts[#parts + 1] = part end
  return parts
end

-- A job that was removed has no fence: whoever comes late must leave nothing of it.
local function count(name, by)
  if redis.call('EXISTS', FENCE) == 1 then redis.call('HINCRBY', COUNTERS, name, by or 1) end
end

-- Events are for watching, not data: old ones may go.
local function tell(event)
  redis.call('XADD', EVENTS, 'MAXLEN', '~', '10000', '*', 'event', event)
end

-- The pending row {entry, owner, idle_ms, deliveries} of a prompt, or nil.
local function lease(entry)
  return redis.call('EXISTS', PROMPTS) == 1 and redis.call('XPENDING', PROMPTS, 'generators', entry, entry, '1')[1]
end

-- How long the latest publications took from their claim, divided by their rounds of sampling; more of them than a median
-- needs would only make it slow to follow.
local RECENT = 31
local function recent_ms()
  local recent = {}
  for ms in string.gmatch(redis.call('HGET', PROGRESS, 'recent_ms') or '', '[^,]+') do recent[#recent + 1] = tonumber(ms) end
  return recent
end

-- A final state clears the iteration, and stands beside it: nothing of an ended job is claimed, renewed or published.
local ENDED = { succeeded = true, failed = true, cancelled = true }
local function is_ended()
  return ENDED[redis.call('HGET', JOB, 'state')] == true
end

local function drop_prompt(entry)
  redis.call('XACK', PROMPTS, 'generators', entry)
  redis.call('XDEL', PROMPTS, entry)
end

-- Where a blocking XREAD starts so that no later entry is missed.
local function last_id(stream)
  if redis.call('EXISTS', stream) == 0 then return '0-0' end
  local info = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
end

-- Empties the iteration: ledger, its prompts and its rollouts, without a look at them. A group goes with what is pending
-- in it and with the names of all who ever read, the dead too. The streams stay: ids must grow for whoever waits.
local function clear_iteration()
  for stream, name in pairs({ [PROMPTS] = 'generators', [ROLLOUTS] = 'trainers' }) do
    group(stream, name)
    redis.call('XTRIM', stream, 'MAXLEN', '0')
    redis.call('XGROUP', 'DESTROY', stream, name)
    group(stream, name)
  end
  redis.call('DEL', LEDGER)
  redis.call('DEL', CLAIMS)
end

-- What is in work of a job that ends, or starts again from a checkpoint, goes.
local function close_iteration()
  if fence('state') ~= 'open' then return end
  clear_iteration()
  redis.call('HSET', FENCE, 'state', 'closed', 'iteration', tonumber(fence('committed')) or -1)
end

-- Fences the trainer off, if there ever was one: it may sleep, or hold an epoch that a restart has forgotten (I4).
local function end_epoch()
  local epoch = tonumber(fence('epoch'))
  if epoch then
    redis.call('HSET', FENCE, 'epoch', string.format('%.0f', math.max(epoch + 1, now_ms())), 'owner', '', 'lease_until', '0')
  end
end

-- Iteration t samples version t, and follows the committed one (I4); arguments as open() takes them.
local function follows(at, committed)
  return tonumber(ARGV[at]) == committed + 1 and tonumber(ARGV[at + 1]) == committed + 1
end

-- Whether the version's manifest is of these very weights: a restart may have lost the newer one, and generators would
-- load what the fence then refuses.
local function is_announced(at)
  local manifest = redis.call('HGET', WEIGHTS, ARGV[at + 1])
  return manifest and string.find(manifest, ARGV[at + 2], 1, true) ~= nil
end

-- Puts a batch on the stream, for its first attempt.
local function expect(id, shape, payload)
  local entry = redis.call('XADD', PROMPTS, '*', 'batch', payload, 'attempt', '1', 'batch_id', id)
  redis.call('HSET', LEDGER, id, 'expected:' .. entry .. ':' .. shape)
end

-- Whether an expected batch is neither on the stream nor settled.
local function is_lost(id)
  local parts = split(redis.call('HGET', LEDGER, id) or 'gone')
  if parts[1] ~= 'expected' then return parts[1] == 'gone' end
  return #redis.call('XRANGE', PROMPTS, parts[2], parts[2]) == 0
end

-- Opens an iteration; arguments from `at`: iteration, version, digest, how many batches it expects, n, then n times (batch
-- id, shape, payload): the first ones. dispatch.lua takes the rest, so that no script holds the server for long.
local function open(at)
  local iteration, version, digest, expected = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  group(PROMPTS, 'generators')
  group(ROLLOUTS, 'trainers')
  for i = at + 5, at + 4 + 3 * tonumber(ARGV[at + 4]), 3 do expect(ARGV[i], ARGV[i + 1], ARGV[i + 2]) end
  redis.call('HSET', FENCE, 'state', 'open', 'iteration', iteration, 'version', version, 'digest', digest,
    'expected', expected, 'opened_ms', now_ms())
  redis.call('HSET', PROGRESS, 'published', 0, 'dead', 0)
end

-- Whether a record follows the newest one: a restart may have lost the one that its writer holds for the last (I4).
local function is_linked(previous)
  local last = redis.call('XREVRANGE', AUDIT, '+', '-', 'COUNT', '1')[1]
  return previous == (last and last[2][4] or '')
end

-- Takes a batch out for good; the trainer sees it in the ledger and decides by its policy.
-- What the batch was follows from the spec and its id, so that only its reason is kept, of the newest 1,000.
local function bury(id, entry, reason)
  reason = string.sub(reason, 1, 2000)
  drop_prompt(entry)
  redis.call('ZREM', CLAIMS, id)
  redis.call('HSET', LEDGER, id, 'dead:' .. reason)
  redis.call('HINCRBY', PROGRESS, 'dead', 1)
  redis.call('XADD', DEAD, 'MAXLEN', '1000', '*', 'batch_id', id, 'reason', reason)
  count('dead')
end

