-- The shared head of every script. KEYS, the same for all:
--   1 fence     hash     epoch owner lease_until lease_ms iteration version digest state committed expected opened_ms ledger_format
--   2 prompts   stream   field batch (PromptBatch), attempt, batch_id
--   3 rollouts  stream   field batch (RolloutBatch), batch_id, digest
--   4 ledger    hash     batch id -> a packed map, by its `state`:
--                          expected    entry, shape; once claimed holder, claimed_ms; once copied hedger, hedged_ms
--                          published   entry, digest, generator, attempt
--                          dead        reason
--   5 weights   hash     version -> WeightManifest
--   6 counters  hash
--   7 dead      stream   field batch_id, reason
--   8 audit     stream   field record (AuditRecord), digest (the next record's `previous`)
--   9 job       hash     state reason created_s started_s ended_s ...
--  10 events    stream   field event (JobEvent), newest 10,000
--  11 progress  hash     published dead (of the open iteration), recent_ms: what generators move; the fence they only read
--  12 claims    zset     batch id -> ms of its claim: batches that may be hedged, those of a first holder without a hedge
-- A script may have more keys of its own, from the 13th on.
-- ARGV[1] is one packed map, `a`: the script's small arguments by their names, the first braces of its head. After it come the
-- payloads, in the order in which the script takes them; none of them is ever packed, joined or cut here.
-- A script is sent with the functions that it reaches, and no others (connection/script_texts.py).
-- A script checks everything before it writes: scripts do not roll back. Each answers a list whose first item is its outcome.
local FENCE, PROMPTS, ROLLOUTS, LEDGER, WEIGHTS, COUNTERS, DEAD, AUDIT, JOB, EVENTS, PROGRESS, CLAIMS = unpack(KEYS)
local a = cmsgpack.unpack(ARGV[1])

local num_taken = 1
local function payload()
  num_taken = num_taken + 1
  return ARGV[num_taken]
end

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- Redis writes some large numbers as 1.7e+12.
local function whole(number)
  return string.format('%.0f', number)
end

-- An entry of a stream: its fields by their names, and its `id`.
local function entry_of(row)
  local entry = { id = row[1] }
  for i = 1, #row[2], 2 do entry[row[2][i]] = row[2][i + 1] end
  return entry
end

-- What stands packed in a hash, or nil for what is none of ours.
local function unpacked(text)
  local is_packed, value = pcall(cmsgpack.unpack, text)
  return is_packed and type(value) == 'table' and value or nil
end

-- A ledger of another format is of an older Onbeat: its iteration is opened anew.
local LEDGER_FORMAT = 2

-- The fence as it stands. One iteration at a time is open: `open` is that one, or nil.
local function read_fence()
  local epoch, committed, state, iteration, version, digest, expected, format = unpack(redis.call('HMGET', FENCE,
    'epoch', 'committed', 'state', 'iteration', 'version', 'digest', 'expected', 'ledger_format'))
  local fence = { epoch = tonumber(epoch), committed = tonumber(committed) or -1, iteration = tonumber(iteration) or -1 }
  if state == 'open' then
    fence.open = { iteration = fence.iteration, version = tonumber(version), digest = digest,
      expected = tonumber(expected), is_readable = tonumber(format) == LEDGER_FORMAT }
  end
  return fence
end

local function is_open_at(fence, iteration)
  return fence.open ~= nil and fence.open.iteration == iteration
end

-- Only the holder of the newest epoch may move the fence (I4); a trainer that never acquired has none.
local function is_trainer()
  return a.epoch ~= nil and tonumber(redis.call('HGET', FENCE, 'epoch')) == a.epoch
end

local function group(stream, name)
  local made = redis.pcall('XGROUP', 'CREATE', stream, name, '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then
    return error(made.err)
  end
end

-- The ledger's record of a batch; one that is not there, or not ours, has no state.
local function batch_of(id)
  local text = redis.call('HGET', LEDGER, id)
  return text and unpacked(text) or {}
end

local function write_batch(id, batch)
  redis.call('HSET', LEDGER, id, cmsgpack.pack(batch))
end

-- Only a script that has seen the fence or the ledger may count: of a job that was removed nothing comes back.
local function count(name, by)
  redis.call('HINCRBY', COUNTERS, name, by or 1)
end

-- Events are for watching, not data: old ones may go.
local function tell(event)
  redis.call('XADD', EVENTS, 'MAXLEN', '~', '10000', '*', 'event', event)
end

-- The holder of a prompt and how often it was delivered, or nil for one that is not pending.
local function lease(entry)
  if redis.call('EXISTS', PROMPTS) == 0 then return nil end
  local row = redis.call('XPENDING', PROMPTS, 'generators', entry, entry, '1')[1]
  return row and { holder = row[2], deliveries = row[4] }
end

-- How long the latest publications took from their claim, divided by their rounds of sampling; more of them than a median
-- needs would only make it slow to follow.
local RECENT = 31
-- How many batches are published, how many are dead, and those times.
local function progress()
  local published, dead, recent_ms = unpack(redis.call('HMGET', PROGRESS, 'published', 'dead', 'recent_ms'))
  return { published = tonumber(published) or 0, dead = tonumber(dead) or 0, recent_ms = recent_ms and unpacked(recent_ms) or {} }
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

-- Where a blocking XREAD starts so that it misses no later entry.
local function last_id(stream)
  if redis.call('EXISTS', stream) == 0 then return '0-0' end
  local info = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
end

-- Empties the iteration: ledger, its prompts and its rollouts, without a look at them. A group goes with what is pending
-- in it and with the names of all that ever read, the dead too. The streams stay: a reader that waits counts on ids that grow.
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
  local fence = read_fence()
  if not fence.open then return end
  clear_iteration()
  redis.call('HSET', FENCE, 'state', 'closed', 'iteration', fence.committed)
end

-- Fences the trainer off, if there ever was one: it may sleep, or hold an epoch that a restart has forgotten (I4).
local function end_epoch()
  local epoch = read_fence().epoch
  if epoch then
    redis.call('HSET', FENCE, 'epoch', whole(math.max(epoch + 1, now_ms())), 'owner', '', 'lease_until', '0')
  end
end

-- Puts a batch {id, shape} on the stream, for its first attempt.
local function expect(batch, prompts)
  local entry = redis.call('XADD', PROMPTS, '*', 'batch', prompts, 'attempt', '1', 'batch_id', batch.id)
  write_batch(batch.id, { state = 'expected', entry = entry, shape = batch.shape })
end

-- Whether a batch is neither on the stream nor settled.
local function is_lost(id)
  local batch = batch_of(id)
  if batch.state ~= 'expected' then return batch.state == nil end
  return #redis.call('XRANGE', PROMPTS, batch.entry, batch.entry) == 0
end

-- An opening is {iteration, policy_version, weights_digest, num_batches, batches}: `batches` are the first of them, whose
-- payloads come with it. dispatch.lua takes the rest, so that no script holds the server for long.

-- Iteration t samples version t, and follows the committed one (I4).
local function follows(opening, committed)
  return opening.iteration == committed + 1 and opening.policy_version == committed + 1
end

-- Whether the version's manifest is of these very weights: a restart may have lost the newer one, and generators would
-- load what the fence then refuses.
local function is_announced(opening)
  local manifest = redis.call('HGET', WEIGHTS, opening.policy_version)
  return manifest and string.find(manifest, opening.weights_digest, 1, true) ~= nil
end

local function open(opening)
  group(PROMPTS, 'generators')
  group(ROLLOUTS, 'trainers')
  for _, batch in ipairs(opening.batches) do expect(batch, payload()) end
  redis.call('HSET', FENCE, 'state', 'open', 'iteration', opening.iteration, 'version', opening.policy_version,
    'digest', opening.weights_digest, 'expected', opening.num_batches, 'opened_ms', whole(now_ms()),
    'ledger_format', LEDGER_FORMAT)
  redis.call('HSET', PROGRESS, 'published', 0, 'dead', 0)
end

-- The digest of the newest audit record, '' before the first.
local function last_link()
  local last = redis.call('XREVRANGE', AUDIT, '+', '-', 'COUNT', '1')[1]
  return last and entry_of(last).digest or ''
end

-- Takes a batch out for good; the trainer sees it in the ledger and decides by its policy.
-- What the batch was follows from the spec and its id, so that only its reason is kept, of the newest 1,000.
local function bury(id, entry, reason)
  reason = string.sub(reason, 1, 2000)
  drop_prompt(entry)
  redis.call('ZREM', CLAIMS, id)
  write_batch(id, { state = 'dead', reason = reason })
  redis.call('HINCRBY', PROGRESS, 'dead', 1)
  redis.call('XADD', DEAD, 'MAXLEN', '1000', '*', 'batch_id', id, 'reason', reason)
  count('dead')
end

