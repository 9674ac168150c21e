-- The shared head of the library.
-- Names of a job's keys; each function call is told the job's id and makes them (`begin`):
--   fence     hash     One field a line; times are ms of Unix time by the server's clock.
--                        epoch           the newest trainer's
--                        owner           the trainer that holds the lease, '' of none
--                        lease_until     when the lease ends
--                        lease_ms        how long it was taken for
--                        committed       the last committed iteration, -1 before the first
--                        num_slots       how many iterations may be open at once
--                        ledger_format   LEDGER_FORMAT of who wrote the window
--                        version_bytes   bytes of the newest version in chunks
--                        window          packed, the open iterations, oldest first: of {iteration, slot,
--                                        oldest_version, newest_version, expected, opened_ms};
--                                        the i-th is committed + i
--                        versions        packed, the versions that sample them, oldest first: of {version, digest}
--   weights   hash     version -> WeightManifest
--   probes    hash     by version, how an engine's proof of it is judged; a version that isn't there needs no proof
--                        VERSION           packed, FenceProbe of broker/proofs.py
--                        VERSION/logprobs  float32, the trainer's log-probs under the version
--                        VERSION/before    the same under the version before, where the trainer has them
--   audit     stream   field record (AuditRecord), digest (the next record's `previous`)
--   job       hash     state reason created_s started_s ended_s ...
--   events    stream   field event (JobEvent), newest 10,000
-- What generators and stage workers write has sealed names: with a secret in them that no role of theirs can read.
-- Rights in Redis go by key, so whatever a function checks, its role could write past it; but it can't write to a key
-- that it can't name (connection/roles.py, decision 18). Sealed are
--   counters  hash
--   dead      stream   field batch_id, reason, attempts
--   buried    stream   what dead batches were
--   spans     stream   field spans
--   missing   zset     number of a claim -> ms of its lease's end: of generators whose batches were settled, or closed,
--                      without a word of theirs. Who says something of its claim goes; who hasn't by the end of the
--                      lease died with it
--   hosts     string   packed, the hosts whose ranks are one trainer: {number, formed, sealed, reason, members,
--                      refused}, and of a generation that stands {least, most, lease_ms, kind, address, key}; see
--                      hosts.lua
--   proofs    hash     VERSION/GENERATOR -> the weights digest of the version, where the generator's engine has shown
--                      what it computes (I11); `first KIND` -> packed {gap, noise}, what the first engine of a kind had
--                      at its first version
--   claimers  hash     who claims -> packed, the newest of its claims as it was answered (see `unheard`)
--   waiting   zset     STAGE/WHO of those whose newest claim found nothing -> stage x 2^42, and on top when that was
--                      (see `wake`)
--   progress  hash     Generators write it; the fence they only read. One field a line:
--                        published:S     published batches of the iteration in slot S
--                        dead:S          dead batches of it
--                        waiting:S       its rows that lack columns, of a job with stages
--                        recent_ms       packed, ms from claim to publication for each round of the latest batches,
--                                        newest first
--                        claim           the number of the newest claim
--                        engine          the one kind of engine that samples a deterministic job, from its first
--                                        claim on
--                        largest         the bytes of the largest published batch
--                        setback         packed, the newest claim that was given back (broker/ledger.py, Setback)
-- and six of each slot. Iteration t lives in slot t % num_slots, and as many iterations as there are slots may be open
-- at once:
--     prompts   hash     batch id -> PromptBatch, of a batch that is neither published nor dead
--     rollouts  stream   field batch (RolloutBatch), batch_id, digest; without batch where stages made columns: it
--                        stays in `items`
--     ledger    hash     batch id -> a packed map, by its `state` (broker/ledger.py):
--                          expected    shape, sent_ms, and version where one alone may sample it
--                          published   entry, digest, generator, attempt, version as before, and in a job with stages:
--                                        shape       as before
--                                        staged_ms   when its stages got it
--                                        left        its items without columns; while there are any, entry is '', and
--                                                    no trainer gets it
--                          dead        reason, version as before
--     claims    zset     batch id -> ms of its claim: batches that may be hedged, those of a first holder without a
--                        hedge
--     work      zset     STAGE/BATCH_ID/ITEM -> stage x 2^42 + the ms of its lease's end, or its turn where it is free,
--                        below 1. It has each item that has its inputs and lacks its columns, leased or free. Stage 0
--                        has one item, 0, of each batch: its rollouts. A job's own stages are counted from 1, and items
--                        from 0
--     items     hash     Of a job with stages b/BATCH_ID -> RolloutBatch, from its publication on; and of each item:
--                          l/ITEM    packed {worker, attempt, claim (its number), claimed_ms, lease_ms} of its last
--                                    claim, of a copied batch hedger, hedge (its number), hedged_ms, and fault, the
--                                    words of the last one
--                          c/ITEM    its packed columns
--                          d/ITEM    their digest, where another stage reads them
--                          n/ITEM    how many of the items are there that its inputs are made by
-- A function gets, in this order,
--   the job's id          '' where it is of none
--   the number of slots   '' where the fence says it
--   a                     one packed map: its small arguments by their names, the first braces of its head
--   payloads              in the order in which it takes them; none of them is ever packed, joined or cut here
-- connection/script_texts.py makes a function of each script in the files next to this one. The code below runs once,
-- when the library is loaded.
-- A function checks everything before it writes: functions do not roll back. Each answers a list whose first item is
-- its outcome.
local SEAL = '@SEAL@'
local JOBS = 'onbeat:jobs'
local ACTIVE = 'onbeat:active'
local REMOVED = 'onbeat:removed'
local SPEC_BYTES = 'onbeat:spec_bytes'
local OWNERS = 'onbeat:owners'
local CHANGES = 'onbeat:changes'

-- Variables of the call that runs; one runs at a time. Names of the job's keys stay for the next call, mostly of the
-- same job.
local ARGUMENTS, JOB_ID, NUM_SLOTS, SLOTS, IS_FULL
local FENCE, WEIGHTS, PROBES, PROOFS, COUNTERS, DEAD, AUDIT, JOB, EVENTS, PROGRESS, CLAIMERS, WAITING, MISSING, HOSTS
local a, num_taken

-- A key of the job by its name.
local function job_key(name)
  return 'onbeat:{' .. JOB_ID .. '}:' .. name
end

-- A key of the job with a sealed name.
local function sealed_key(name)
  return 'onbeat:' .. SEAL .. ':{' .. JOB_ID .. '}:' .. name
end

-- As in keys.py: most iterations that any job can have open at once.
local MAX_SLOTS = 17

-- Longest text of a number of slots.
local MAX_DIGITS = 32

-- Lists that are longer than the function takes; what is no list is left to the function. lists: as of bounds.py
local function require_short(holder, lists)
  if type(holder) ~= 'table' then return end
  for _, list in ipairs(lists) do
    local value = holder[list.name]
    if list.most and type(value) == 'table' then
      if #value > list.most then
        return error(list.name .. ' has ' .. #value .. ' elements, and at most ' .. list.most .. ' are taken')
      end
      for _, element in ipairs(list.inside[1] and value or {}) do require_short(element, list.inside) end
    elseif not list.most then
      require_short(value, list.inside)
    end
  end
end

-- A call that is larger than connection/bounds.py allows ends before anything of it is decoded.
local function require_size(arguments, bounds)
  local num_payloads = #arguments - 3
  local num_bytes = 0
  if num_payloads < 0 then return error('a function is called with a job, a number of slots and its arguments') end
  if num_payloads > bounds.payloads then
    return error(num_payloads .. ' payloads, and at most ' .. bounds.payloads .. ' are taken')
  end
  if #arguments[1] > 64 or #arguments[2] > MAX_DIGITS then return error('not a job id, or not a number of slots') end
  if #arguments[3] > bounds.packed_bytes then
    return error(#arguments[3] .. ' bytes of arguments, and at most ' .. bounds.packed_bytes .. ' are taken')
  end
  for index = 4, #arguments do num_bytes = num_bytes + #arguments[index] end
  if num_bytes > bounds.payload_bytes then
    return error(num_bytes .. ' bytes of payloads, and at most ' .. bounds.payload_bytes .. ' are taken')
  end
end

-- is_full: whether the server is at maxmemory, and the function is one that brings payloads. bounds: how much the
-- function takes.
local function begin(arguments, is_full, bounds)
  require_size(arguments, bounds)
  -- Behind the three head arguments the payloads follow: `payload` takes them from the fourth on, each once, in order.
  local job_id = arguments[1]
  ARGUMENTS = arguments
  NUM_SLOTS = tonumber(arguments[2])
  IS_FULL = is_full
  num_taken = 3
  if NUM_SLOTS and not (NUM_SLOTS >= 1 and NUM_SLOTS <= MAX_SLOTS) then return error('not a number of slots') end
  a = cmsgpack.unpack(arguments[3])
  require_short(a, bounds.lists)
  if job_id == JOB_ID then return end
  if not string.match(job_id, '^[%w-]*$') then return error('not a job id') end
  JOB_ID = job_id
  SLOTS = {}
  FENCE = job_key('fence')
  WEIGHTS = job_key('weights')
  PROBES = job_key('probes')
  PROOFS = sealed_key('proofs')
  AUDIT = job_key('audit')
  JOB = job_key('job')
  EVENTS = job_key('events')
  COUNTERS = sealed_key('counters')
  DEAD = sealed_key('dead')
  PROGRESS = sealed_key('progress')
  CLAIMERS = sealed_key('claimers')
  WAITING = sealed_key('waiting')
  MISSING = sealed_key('missing')
  HOSTS = sealed_key('hosts')
end

local function payload()
  num_taken = num_taken + 1
  return ARGUMENTS[num_taken] or error('a payload is missing')
end

local function now_ms()
  local t = redis.call('TIME')
  -- TIME answers seconds and the microseconds behind them; all times here are whole ms of Unix time.
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- Redis writes some large numbers as 1.7e+12.
local function whole(number)
  return string.format('%.0f', number)
end

-- The bytes that count for the server's limit, and the limit; 0 without one.
local function memory()
  local info = redis.call('INFO', 'memory')
  -- Found as it stands, then matched there: a pattern that is tried at each byte takes five times as long as the
  -- command.
  local function of(name)
    local _, at = string.find(info, '\n' .. name .. ':', 1, true)
    return at and tonumber(string.match(info, '^%d+', at + 1)) or 0
  end
  return of('used_memory') - of('mem_not_counted_for_evict'), of('maxmemory')
end

-- A number that a generator or a stage worker names; one that is none, or none of a sound size, would make a loop
-- endless.
local function require_number(number, least, most)
  local is_whole = type(number) == 'number' and number == math.floor(number)
  local is_sound = is_whole and number >= least and number <= (most or 2 ^ 40)
  return is_sound or error('not a whole number of at least ' .. least)
end

-- The idempotency key of a job's submission may be used again; another job's stays.
local function drop_reservation(key)
  local reservation = 'onbeat:idempotency:' .. key
  local reserved = redis.call('GET', reservation)
  if reserved and string.sub(reserved, 1, #JOB_ID + 1) == JOB_ID .. ' ' then redis.call('DEL', reservation) end
end

-- Where processes of a kind say that they live: generators | stage_workers | consumers | task_workers.
local KINDS = { generators = true, stage_workers = true, consumers = true, task_workers = true }
local function presence_key(kind)
  return KINDS[kind] and 'onbeat:' .. SEAL .. ':' .. kind or error('not a kind of process')
end

-- An entry of a stream: its fields by their names, and its `id`.
local function entry_of(row)
  local entry = { id = row[1] }
  for i = 1, #row[2], 2 do entry[row[2][i]] = row[2][i + 1] end
  return entry
end

-- Unpacks a value of a hash; nil for none, and for what is none of ours.
local function unpacked(text)
  local is_packed, value = pcall(cmsgpack.unpack, text)
  -- A plain word unpacks to a number or a string: that is no record of ours either.
  return is_packed and type(value) == 'table' and value or nil
end

-- What the fence says, where that is a number of slots: loops run over them, and a role may have written the field by
-- hand.
local function sound_slots(text)
  local slots = tonumber(text)
  return slots and slots >= 1 and slots <= MAX_SLOTS and slots == math.floor(slots) and slots or 1
end

local function num_slots()
  NUM_SLOTS = NUM_SLOTS or sound_slots(redis.call('HGET', FENCE, 'num_slots'))
  return NUM_SLOTS
end

local SLOT_NAMES = { 'prompts', 'rollouts', 'ledger', 'claims', 'work', 'items' }

-- Counted from 0.
local function slot_at(index)
  local slot = SLOTS[index]
  if not slot then
    local behind = index > 0 and ':' .. whole(index) or ''
    slot = { index = index }
    for _, name in ipairs(SLOT_NAMES) do slot[name] = sealed_key(name .. behind) end
    SLOTS[index] = slot
  end
  return slot
end

local function slot_of(iteration)
  return slot_at(iteration % num_slots())
end

-- A ledger of another format is of an older Onbeat: its iteration is opened anew.
local LEDGER_FORMAT = 7

-- The fence as it stands; a change of it lasts only once it is written.
local function read_fence()
  local epoch, committed, format, window, versions, slots = unpack(redis.call('HMGET', FENCE,
    'epoch', 'committed', 'ledger_format', 'window', 'versions', 'num_slots'))
  NUM_SLOTS = NUM_SLOTS or sound_slots(slots)
  local is_readable = tonumber(format) == LEDGER_FORMAT
  return { epoch = tonumber(epoch), committed = tonumber(committed) or -1,
    window = is_readable and unpacked(window) or {}, packed_versions = is_readable and versions }
end

-- What samples the window; most scripts don't ask.
local function versions_of(fence)
  if not fence.versions then fence.versions = unpacked(fence.packed_versions) or {} end
  return fence.versions
end

-- Older versions than the window's oldest go: no batch that may still come was sampled by them.
local function write_fence(fence)
  -- With nothing open the next iteration is committed + 1, and its newest version has the same number: what is older
  -- goes.
  local oldest = fence.window[1] and fence.window[1].oldest_version or fence.committed + 1
  local versions = versions_of(fence)
  -- The list is ascending, so what is too old stands at its beginning.
  while versions[1] and versions[1].version < oldest do table.remove(versions, 1) end
  redis.call('HSET', FENCE, 'committed', fence.committed, 'window', cmsgpack.pack(fence.window),
    'versions', cmsgpack.pack(versions), 'ledger_format', LEDGER_FORMAT)
end

-- The iteration where it is open, or nil.
local function open_at(fence, iteration)
  -- The first of the window is committed + 1, and Lua counts from 1: an iteration outside finds nil.
  return fence.window[iteration - fence.committed]
end

-- The newest open iteration, or the last one.
local function newest_iteration(fence)
  return fence.committed + #fence.window
end

-- The digest of a version that may sample the window, or nil.
local function digest_of(fence, version)
  for _, known in ipairs(versions_of(fence)) do
    if known.version == version then return known.digest end
  end
end

-- How many times the gap of the first engine of a kind a later one of that kind may have: the largest of some hundred
-- differences moves from version to version by a few times itself, and an engine that computes wrongly is further off
-- by orders.
local SLACK = 16

-- The field of a generator's proof of a version.
local function proof_of(version, generator)
  return whole(version) .. '/' .. generator
end

-- Whether a generator may sample with a version: its engine has shown what it computes with these very weights, or
-- nothing is asked (I11). What another hand wrote there is no digest of the version.
local function is_proved(version, digest, generator)
  if redis.call('HEXISTS', PROBES, version) == 0 then return true end
  return digest ~= nil and redis.call('HGET', PROOFS, proof_of(version, generator)) == digest
end

-- Of some fields those that begin with a version between two, both included.
local function of_versions(fields, from, to)
  local out = {}
  for _, field in ipairs(fields) do
    local version = tonumber(string.match(field, '^%d+'))
    if version and version >= from and version <= to then out[#out + 1] = field end
  end
  return out
end

-- The oldest and the newest version that may sample a batch of an open iteration.
local function range_of(iteration, batch)
  if batch.version then return batch.version, batch.version end
  return iteration.oldest_version, iteration.newest_version
end

-- Only the holder of the newest epoch may move the fence (I4); a trainer that never acquired has none.
local function is_trainer()
  return a.epoch ~= nil and tonumber(redis.call('HGET', FENCE, 'epoch')) == a.epoch
end

-- Every function that is told an epoch first runs behind this (connection/script_texts.py).
local function as_trainer(run)
  if not is_trainer() then return { 'fenced' } end
  return run()
end

local function group(stream, name)
  -- From entry 0 on: what was published before the group was made is given out, too.
  local answer = redis.pcall('XGROUP', 'CREATE', stream, name, '0', 'MKSTREAM')
  if type(answer) == 'table' and answer.err and not string.find(answer.err, 'BUSYGROUP', 1, true) then
    return error(answer.err)
  end
end

-- The ledger's record of a batch; one that is not there, or not ours, has no state.
local function batch_of(slot, id)
  return unpacked(redis.call('HGET', slot.ledger, id)) or {}
end

local function write_batch(slot, id, batch)
  redis.call('HSET', slot.ledger, id, cmsgpack.pack(batch))
end

-- Only a script that has seen the fence or the ledger may count: of a job that was removed nothing comes back.
local function count(name, by)
  redis.call('HINCRBY', COUNTERS, name, by or 1)
end

-- Events are for watching, not data: old ones may go.
local function tell(event)
  redis.call('XADD', EVENTS, 'MAXLEN', '~', '10000', '*', 'event', event)
end

-- The kind of engine that samples a deterministic job, or nil before its first claim.
local function engine_of_job()
  return redis.call('HGET', PROGRESS, 'engine') or nil
end

-- Two kinds of engines give a batch other bits: the first one that is named stays the job's (I7).
local function is_other_engine(engine, named)
  return named ~= nil and engine ~= nil and engine ~= named
end

local function keep_engine(engine, named)
  if named and not engine then redis.call('HSET', PROGRESS, 'engine', named) end
end

-- A claim is known by its number, which no other claim of the job ever has: it grows, and goes by the server's clock as
-- well as by what was counted, as epochs do. So a call under a claim that a rewind, a resume or a restart has ended is
-- never taken for one under the claim that came after it, of the same batch, attempt and holder.
local function new_claim()
  -- Above the counter and not below the clock: a restart that has lost the last second of counting starts above what it
  -- gave out.
  local number = math.max((tonumber(redis.call('HGET', PROGRESS, 'claim')) or 0) + 1, now_ms())
  redis.call('HSET', PROGRESS, 'claim', whole(number))
  return number
end

-- The largest number of a claim: beyond it doubles aren't exact.
local MAX_CLAIM = 2 ^ 53

-- Whether a caller names this very claim.
local function is_claim(number, named)
  return named == number and type(named) == 'number'
end

-- The newest claim of one who claims, where it has not heard of it: the answer was lost, and it is given again. So at
-- most one claim of each is unheard of, and a call that was sent again, or came late, takes nothing new. heard: the
-- number of the newest that it knows.
-- A name is of one life of a process (`StackSettings.process_id` of contracts/settings.py): a process that comes back
-- has another name, so what its last life has died of counts as an attempt and is not given to it again as unheard.
local function unheard(who, heard)
  if type(who) ~= 'string' then return error('not a name') end
  local last = unpacked(redis.call('HGET', CLAIMERS, who))
  if last and last.claim > heard then return last end
end

local MAX_CLAIMERS = 4096
local MAX_WHO = 300
local function note_claimer(who, last)
  -- Who is forgotten so waits for the end of a lease.
  if redis.call('HLEN', CLAIMERS) >= MAX_CLAIMERS and redis.call('HEXISTS', CLAIMERS, who) == 0 then
    redis.call('DEL', CLAIMERS)
  end
  if #who <= MAX_WHO then redis.call('HSET', CLAIMERS, who, cmsgpack.pack(last)) end
end

-- How many batches of a slot's iteration are published, and how many are dead.
local function progress(slot)
  local published, dead = unpack(redis.call('HMGET', PROGRESS, 'published:' .. slot.index, 'dead:' .. slot.index))
  return { published = tonumber(published) or 0, dead = tonumber(dead) or 0 }
end

-- For a payload that would be written to a server at maxmemory: there is no room, unless iterations of a window, from
-- the first-th on, have published batches, which their commits free. The words are the server's own.
local function require_room(window, first)
  -- The loop has no round on a server with room.
  for index = first, IS_FULL and #window or 0 do
    if progress(slot_of(window[index].iteration)).published > 0 then return end
  end
  if IS_FULL then return error({ err = "OOM command not allowed when used memory > 'maxmemory'." }) end
end

-- How long the latest publications took from their claim, divided by their rounds of sampling; more of them than a
-- median needs would only make it slow to follow.
local RECENT = 31

-- A final state clears the window, and stands beside it: nothing of an ended job is claimed, renewed or published.
local ENDED = { succeeded = true, failed = true, cancelled = true }
local function is_ended()
  return ENDED[redis.call('HGET', JOB, 'state')] == true
end

-- The scores of a stage in `work`: no lease ends beyond it.
local BAND = 2 ^ 42

-- Empties a slot: all that its iteration has, without a look at it. A group goes with what is pending in it and with
-- the names of all that ever read, the dead too. The stream stays: a reader that waits counts on ids that grow.
local function clear_slot(slot)
  if redis.call('EXISTS', slot.rollouts) == 1 then
    -- XTRIM keeps the last id that the stream has given out, which DEL would set back to 0-0.
    redis.call('XTRIM', slot.rollouts, 'MAXLEN', '0')
    redis.call('XGROUP', 'DESTROY', slot.rollouts, 'trainers')
    group(slot.rollouts, 'trainers')
  end
  redis.call('DEL', slot.ledger)
  redis.call('DEL', slot.claims)
  redis.call('DEL', slot.work)
  redis.call('UNLINK', slot.prompts)
  redis.call('UNLINK', slot.items)
  redis.call('HDEL', PROGRESS, 'waiting:' .. slot.index)
end

-- The last claim of an item.
local function claim_of(slot, member)
  return unpacked(redis.call('HGET', slot.items, 'l/' .. member)) or { attempt = 0 }
end

-- Notes who holds batches of a slot that is about to be cleared: those who live hear of it when they renew their
-- leases.
local MAX_NOTED = 1024
local function note_holders(slot)
  -- Scores of stage 0 from 1 on are ends of leases; free turns stand below 1. The answer is member, score, member,
  -- score.
  local leased = redis.call('ZRANGE', slot.work, '1', whole(BAND - 1), 'BYSCORE', 'LIMIT', '0', MAX_NOTED, 'WITHSCORES')
  for at = 1, #leased, 2 do
    local claim = claim_of(slot, leased[at]).claim
    if claim then redis.call('ZADD', MISSING, leased[at + 1], whole(claim)) end
  end
end

-- Who says something of its claim lives.
local function heard_of(claim)
  redis.call('ZREM', MISSING, whole(claim))
end

-- Nothing is open any more. committed: the last iteration that stays.
local function close_window(committed)
  for index = 0, num_slots() - 1 do
    note_holders(slot_at(index))
    clear_slot(slot_at(index))
  end
  redis.call('DEL', CLAIMERS)
  write_fence({ committed = committed, window = {}, versions = {} })
end

-- What is in work of a job that ends, or starts again from a checkpoint, goes.
local function end_window()
  if redis.call('HEXISTS', FENCE, 'ledger_format') == 1 then close_window(read_fence().committed) end
end

-- Fences the trainer off, if there ever was one: it may sleep, or hold an epoch that a restart has forgotten (I4).
local function end_epoch()
  local epoch = read_fence().epoch
  if epoch then
    -- Above the last epoch and not below the clock, as in acquire_trainer: no epoch is given out twice.
    redis.call('HSET', FENCE, 'epoch', whole(math.max(epoch + 1, now_ms())), 'owner', '', 'lease_until', '0')
  end
end

local function write_hosts(hosts)
  redis.call('SET', HOSTS, cmsgpack.pack(hosts))
end

-- The generation ends, and with a sealed one its trainer's hold on the job. What was refused stays, to be told.
local function end_hosts(hosts, reason)
  if hosts.sealed ~= 0 then end_epoch() end
  hosts = { number = hosts.number, formed = 0, sealed = 0, members = {}, refused = hosts.refused, reason = reason }
  write_hosts(hosts)
  return hosts
end

-- The hosts as they are now: a member whose lease is over, or from before a clock stepped back, has ended its
-- generation.
local function standing_hosts()
  local hosts = unpacked(redis.call('GET', HOSTS))
    or { number = 0, formed = 0, sealed = 0, members = {}, refused = {}, reason = '' }
  local now = now_ms()
  for _, member in ipairs(hosts.members) do
    -- A lease that ends later than two of its lengths was written before the clock stepped back.
    local left = member.until_ms - now
    if left <= 0 or left > 2 * hosts.lease_ms then return end_hosts(hosts, 'lost ' .. member.host) end
  end
  return hosts
end

-- Consumers block on `changes`, and look in any case every other second. what: 'asked' of a job that may want a trainer
-- or its end, 'removed' of one whose files are to go.
local function wake_consumers(what)
  redis.pcall('XADD', CHANGES, 'MAXLEN', '100', '*', 'what', what)
end

-- Tasks: see tasks.lua.
local TASKS, OPEN_TASKS, TASK_NAMES, TASK_COUNTS, CLOCK =
  'onbeat:tasks', 'onbeat:open_tasks', 'onbeat:task_names', 'onbeat:task_counts', 'onbeat:clock'
local TASK_ENDED = { done = true, failed = true, cancelled = true }
-- What the names of queues begin with.
local HAS_QUEUE = { check = true, files = true, clock = true }
-- The message of a task that no worker has begun after so long may be lost.
local RESEND_MS = 15000
-- So long the clock remembers the runs of an entry that it no longer has.
local FORGOTTEN_MS = 30 * 86400 * 1000

local function task_key(id)
  local is_task_id = type(id) == 'string' and string.match(id, '^task%-%x%x%x%x%x%x%x%x%x%x%x%x$')
  if not is_task_id then return error('not a task id') end
  return 'onbeat:task:' .. id
end

-- The task is over: nothing waits for it, and what was asked may be asked again.
local function close_task(id, state, kind, same)
  redis.call('ZREM', OPEN_TASKS, id)
  redis.call('HDEL', TASK_NAMES, same)
  redis.call('HINCRBY', TASK_COUNTS, state .. ' ' .. kind, 1)
end

-- Tells the watchers of the call's job; a job that was removed has none.
local function tell_of_task(event)
  if event ~= '' and JOB_ID ~= '' and redis.call('HEXISTS', JOB, 'state') == 1 then tell(event) end
end

-- The id of the oldest task that waits in a queue, which its caller sends a message for; but_for: one that it leaves
-- alone.
local function oldest_waiting(queue, but_for)
  local oldest = ''
  local since = math.huge
  for _, id in ipairs(redis.call('ZRANGE', OPEN_TASKS, 0, -1)) do
    local its_queue, state, created = unpack(redis.call('HMGET', task_key(id), 'queue', 'state', 'created_ms'))
    local created_ms = tonumber(created) or 0
    if id ~= but_for and its_queue == queue and state == 'queued' and created_ms < since then
      oldest = id
      since = created_ms
    end
  end
  -- Its caller sends a message now: `due_tasks` needs not send another before this time.
  if oldest ~= '' then redis.call('ZADD', OPEN_TASKS, whole(now_ms() + RESEND_MS), oldest) end
  return oldest
end

-- What is leased: batches by generators, as stage 0, and items of a job's own stages by stage workers.

local function member_of(stage, id, item)
  return whole(stage) .. '/' .. id .. '/' .. whole(item)
end

-- Stage 0 is leased by generators, a job's own by stage workers: neither has a say in what the other holds.
local function require_worker_of(stage)
  local role = stage == 0 and 'generator' or 'stage'
  return redis.acl_check_cmd('GET', 'onbeat:role:' .. role) or error('a lease of the other role')
end

-- The words of a command in pieces, for Lua unpacks some thousands at once.
local function pieces(words)
  local out = {}
  for first = 1, #words, 1000 do out[#out + 1] = { unpack(words, first, math.min(first + 999, #words)) } end
  return out
end

-- A command of one key with as many words as there are.
local function call_with(command, key, words)
  for _, piece in ipairs(pieces(words)) do redis.call(command, key, unpack(piece)) end
end

-- What such a command answers for each of its words; false for what is not there.
local function each_of(command, key, words)
  local out = {}
  for _, piece in ipairs(pieces(words)) do
    for _, value in ipairs(redis.call(command, key, unpack(piece))) do out[#out + 1] = value end
  end
  return out
end

-- The names of items in `items`, behind a letter.
local function behind(letter, members)
  local names = {}
  for at, member in ipairs(members) do names[at] = letter .. member end
  return names
end

local function score_of(stage, ends_ms)
  -- 17 digits give a double back exactly. The sum has to stay below 2^53 for each ms to count: BAND has room for ms of
  -- Unix time until the year 2109, and 2^53 / BAND for 2,047 stages.
  return string.format('%.17g', stage * BAND + ends_ms)
end

-- Who claims in vain listens to a channel of its own, and looks again in any case each second: a wake is a hint, so one
-- that goes to a dead worker, or one who calls without need, costs no more than that. Neither the file nor a replica
-- has it: a server that waits writes nothing. is_idle: one that has work in hand, or can't take all, comes a second
-- behind the others.
local IDLE_MS = 1000
local function note_waiting(stage, who, from_ms)
  if #who > MAX_WHO or redis.call('EXISTS', JOB) == 0 or is_ended() then return end
  -- Neither the append-only file nor a replica has what follows, until the switch back.
  redis.set_repl(redis.REPL_NONE)
  if redis.call('ZCARD', WAITING) >= MAX_CLAIMERS then redis.call('ZREMRANGEBYRANK', WAITING, '0', '0') end
  redis.call('ZADD', WAITING, score_of(stage, from_ms), whole(stage) .. '/' .. who)
  redis.set_repl(redis.REPL_ALL)
end

-- Wakes as many as there are pieces of work for. Who waits last comes first: the dead don't come again.
local function wake(stage, number)
  -- With REV the upper bound comes first, and the answer begins at the highest score.
  local highest = score_of(stage, BAND - 1)
  local lowest = score_of(stage, 1)
  local members = redis.call('ZRANGE', WAITING, highest, lowest, 'BYSCORE', 'REV', 'LIMIT', '0', number)
  redis.set_repl(redis.REPL_NONE)
  call_with('ZREM', WAITING, members)
  local from = #whole(stage) + 2 -- behind the slash
  for _, member in ipairs(members) do
    local woken = 'onbeat:wake:' .. string.sub(member, from)
    redis.pcall('PUBLISH', woken, '') -- a user that lacks this right must not stop halfway
  end
  redis.set_repl(redis.REPL_ALL)
end

-- Items of a stage by the ends of their leases, at most so many. What is free has its turn there, which is never beyond
-- this:
local LAST_TURN = 0.5
local function in_work(slot, stage, from, to, number)
  return redis.call('ZRANGE', slot.work, score_of(stage, from), score_of(stage, to), 'BYSCORE', 'LIMIT', '0', number)
end

-- The items of a stage whose lease has ended, at most `number` of them: their worker has died or hangs. If there are
-- none, the items whose lease ends later than any lease can: the server's clock has stepped back since.
local function expired_items(slot, stage, now, lease_ms, number)
  -- From 1 on: what is free has its turn below 1, and is no lease.
  local ended = in_work(slot, stage, 1, now, number)
  -- Twice the length leaves room for a worker whose leases are longer than the asker's.
  return ended[1] and ended or in_work(slot, stage, now + 2 * lease_ms + 1, BAND - 1, number)
end

-- Puts items of a stage in work.
local function set_free(slot, stage, id, first, last)
  local words = {}
  local score = score_of(stage, 0)
  for item = first, last do
    words[#words + 1] = score
    words[#words + 1] = member_of(stage, id, item)
  end
  call_with('ZADD', slot.work, words)
end

-- The score of a batch, whose turn comes behind so many that were sent before.
local function turn_behind(number)
  -- 2^20 batches have turns of their own; all behind them share the last one, in the order of their names.
  return score_of(0, math.min(number / 2 ^ 21, LAST_TURN))
end

-- Gives the item of a lease back, and answers an outcome, the batch, and the attempts. The outcomes:
--   retried    its caller sets it free
--   released   its caller sets it free, as if it had not been claimed
--   dead       past its attempts
--   settled    it is not the caller's any more
-- Only the claim that holds the lease may: one that lost it, or is of a copy, would take the work from the
-- holder. is_released: it comes back as if it had not been claimed, for the fault was not its own: the attempt doesn't
-- count (I6).
-- An attempt that fails by the fault of one before it is the last; its reason, which is answered behind the attempts,
-- says so.
local SAME_WORDS = ' (word for word as in an attempt before)'
local function give_back(lease, state, counter, max_attempts, is_released, reason, fault)
  require_worker_of(lease.stage)
  local slot = slot_of(lease.iteration)
  local member = member_of(lease.stage, lease.batch_id, lease.item)
  local batch = batch_of(slot, lease.batch_id)
  local last = claim_of(slot, member)
  heard_of(lease.claim)
  local is_over = is_ended() or not open_at(read_fence(), lease.iteration) or batch.state ~= state
  is_over = is_over or not is_claim(last.claim, lease.claim) or not redis.call('ZSCORE', slot.work, member)
  if is_over then return 'settled' end
  count(string.format(counter, is_released and 'released' or 'failed'))
  -- A fault of code that repeats word for word would do so at each attempt that is left.
  fault = type(fault) == 'string' and fault ~= '' and fault or nil
  local is_same = fault ~= nil and fault == last.fault
  if (is_same or last.attempt >= max_attempts) and not is_released then
    return 'dead', batch, last.attempt, is_same and reason .. SAME_WORDS or reason
  end
  -- What a person who waits is told.
  redis.call('HSET', PROGRESS, 'setback', cmsgpack.pack({ stage = lease.stage, iteration = lease.iteration,
    batch_id = lease.batch_id, item = lease.item, worker = last.worker, attempt = last.attempt,
    is_released = is_released == true, reason = reason, at_ms = now_ms() }))
  -- A released attempt is taken back, so that it doesn't count. The number of the claim goes: no worker holds the item.
  local given_back = {
    worker = '',
    attempt = is_released and last.attempt - 1 or last.attempt,
    claimed_ms = last.claimed_ms,
    fault = fault or last.fault,
  }
  redis.call('HSET', slot.items, 'l/' .. member, cmsgpack.pack(given_back))
  return is_released and 'released' or 'retried'
end

-- Puts batches {id, shape, version, prompts} in work, for their first attempts; version: the only one that may sample
-- it, or none.
local function expect(slot, batches)
  local before = redis.call('HLEN', slot.ledger)
  local now = now_ms()
  -- Words of HSET on `prompts`, of ZADD on `work` (the score before the member), and of HSET on `ledger`.
  local payloads = {}
  local turns = {}
  local records = {}
  for index, batch in ipairs(batches) do
    -- Words come in pairs: the index-th pair stands at 2 * index - 1 and 2 * index.
    local at = 2 * index
    local record = { state = 'expected', shape = batch.shape, version = batch.version, sent_ms = now }
    payloads[at - 1] = batch.id
    payloads[at] = batch.prompts
    turns[at - 1] = turn_behind(before + index - 1)
    turns[at] = member_of(0, batch.id, 0)
    records[at - 1] = batch.id
    records[at] = cmsgpack.pack(record)
  end
  call_with('HSET', slot.prompts, payloads)
  call_with('ZADD', slot.work, turns)
  call_with('HSET', slot.ledger, records)
end

-- Removes what stands of a batch next to the ledger: it is settled, or sent anew.
local function drop_prompt(slot, id)
  local member = member_of(0, id, 0)
  redis.call('ZREM', slot.work, member)
  redis.call('HDEL', slot.items, 'l/' .. member)
  redis.call('HDEL', slot.prompts, id)
  redis.call('ZREM', slot.claims, id)
end

-- Whether a batch is neither in work nor settled.
local function is_lost(slot, id)
  local state = batch_of(slot, id).state
  -- A batch without a record is lost; a published or dead one is settled.
  if state ~= 'expected' then return state == nil end
  return not redis.call('ZSCORE', slot.work, member_of(0, id, 0)) or redis.call('HEXISTS', slot.prompts, id) == 0
end

-- Whether each batch that one version alone may sample finds that version.
local function are_versions_known(fence, batches)
  for _, batch in ipairs(batches) do
    if batch.version and not digest_of(fence, batch.version) then return false end
  end
  return true
end

-- Takes a version {version, digest} into a fence that was read, or says why not. Its manifest has to be of these very
-- weights: a restart may have lost the newer one, and generators would load what the fence then refuses.
local function add_version(fence, version)
  local known = digest_of(fence, version.version)
  -- The commit of iteration t makes version t + 1, and none can be newer. Another digest of a known version is other
  -- weights.
  if version.version > fence.committed + 1 or (known and known ~= version.digest) then return 'out_of_order' end
  local manifest = redis.call('HGET', WEIGHTS, version.version)
  if not manifest or not string.find(manifest, version.digest, 1, true) then return 'no_manifest' end
  if not known then
    table.insert(versions_of(fence), version)
    table.sort(versions_of(fence), function(older, newer) return older.version < newer.version end)
  end
end

-- An opening is {iteration, oldest_version, newest_version, num_batches, batches}: `batches` are the first of them,
-- whose payloads come with it. `dispatch` (trainer.lua) takes the rest, so that no script holds the server for long.

-- An iteration follows the newest one (I4), finds a slot free, is sampled by no version beyond its own, and by none
-- that is older than the window is long (I2).
local function is_next(fence, opening)
  local iteration = opening.iteration
  local oldest = opening.oldest_version
  local newest = opening.newest_version
  -- Versions are counted as iterations are: version t is that which iteration t begins with, so a lag is iteration -
  -- version.
  return iteration == newest_iteration(fence) + 1 and #fence.window < num_slots()
    and newest <= iteration and oldest <= newest and oldest >= math.max(0, iteration - num_slots() + 1)
end

-- Whether an opening finds the version that its first claim may be answered with.
local function is_samplable(fence, opening)
  return digest_of(fence, opening.oldest_version) ~= nil and are_versions_known(fence, opening.batches)
end

-- Opens an iteration in its slot, which is clear.
local function open(fence, opening)
  local slot = slot_of(opening.iteration)
  group(slot.rollouts, 'trainers')
  for _, batch in ipairs(opening.batches) do batch.prompts = payload() end
  expect(slot, opening.batches)
  table.insert(fence.window, {
    iteration = opening.iteration,
    slot = slot.index,
    oldest_version = opening.oldest_version,
    newest_version = opening.newest_version,
    expected = opening.num_batches,
    opened_ms = now_ms(),
  })
  redis.call('HSET', PROGRESS, 'published:' .. slot.index, 0, 'dead:' .. slot.index, 0)
  wake(0, #opening.batches)
end

-- The digest of the newest audit record, '' before the first.
local function last_link()
  local last = redis.call('XREVRANGE', AUDIT, '+', '-', 'COUNT', '1')[1]
  return last and entry_of(last).digest or ''
end

-- Takes a batch out for good; the trainer sees it in the ledger and decides by its policy.
-- Its reason stays, of the newest 1,000. content: {field, bytes}, for a person to read: the field 'prompts'
-- (PromptBatch) or 'rollouts' (RolloutBatch). It stays with the newest MAX_KEPT and up to MAX_KEPT_BYTES, so that all
-- are 4 MB at most.
local MAX_KEPT = 64
local MAX_KEPT_BYTES = 65536
local function note_death(slot, id, batch, reason, attempts, content)
  reason = string.sub(reason, 1, 2000)
  write_batch(slot, id, { state = 'dead', reason = reason, version = batch.version })
  redis.call('HINCRBY', PROGRESS, 'dead:' .. slot.index, 1)
  local fields = { 'batch_id', id, 'reason', reason, 'attempts', whole(attempts) }
  local entry = redis.call('XADD', DEAD, 'MAXLEN', '1000', '*', unpack(fields))
  if content.bytes and #content.bytes <= MAX_KEPT_BYTES then
    redis.call('XADD', sealed_key('buried'), 'MAXLEN', MAX_KEPT, entry, content.field, content.bytes)
  end
  count('dead')
end

-- Gives up a batch that is not published and has no attempt left: it leaves `work` and `prompts`, and is `dead` in the
-- ledger.
local function bury(slot, id, batch, reason, attempts)
  local prompts = redis.call('HGET', slot.prompts, id)
  drop_prompt(slot, id)
  note_death(slot, id, batch, reason, attempts, { field = 'prompts', bytes = prompts })
end

-- What follows is of jobs with stages. `stages` are those of the spec: of {unit, after}, after: the stages whose
-- columns a stage reads.

-- Most rows of a batch (contracts/spec/limits.py): loops run over them.
local MAX_ROWS = 2 ^ 14

local function num_rows(batch)
  local num_groups, group_size = string.match(batch.shape, '^(%d+)x(%d+)$')
  -- PROMPTSxSAMPLES: the prompts are groups, and a row is one completion.
  local rows = (num_groups or 0) * (group_size or 0)
  if rows < 1 or rows > MAX_ROWS then return error('not the shape of a batch') end
  return rows, tonumber(group_size)
end

-- How many rows of the batch an item of the stage has.
local function item_rows(stage, batch)
  local rows, group_size = num_rows(batch)
  return stage.unit == 'row' and 1 or stage.unit == 'group' and group_size or rows
end

-- The first and the last item of another stage that have rows of this one.
local function overlap(stage, other, batch, item)
  local rows = item_rows(stage, batch)
  local its = item_rows(other, batch)
  -- Rows item * rows to item * rows + rows - 1, by the size of the other's items. For groups of 4 of a batch of 8:
  -- group 1 has rows 4 to 7, so of a stage by row items 4 to 7, of a stage by batch item 0.
  return math.floor(item * rows / its), math.floor((item * rows + rows - 1) / its)
end

-- Takes a published batch out that stages have given up, with its items and columns. Answers how many items it had.
local function bury_staged(slot, id, batch, stages, reason, attempts)
  local members = {}
  local fields = { 'b/' .. id }
  local rollouts = redis.call('HGET', slot.items, 'b/' .. id)
  for number, stage in ipairs(stages) do
    -- Items are counted from 0; their number is whole, since a shape is groups times their size.
    for item = 0, num_rows(batch) / item_rows(stage, batch) - 1 do
      local member = member_of(number, id, item)
      members[#members + 1] = member
      for _, kind in ipairs({ 'c/', 'd/', 'l/', 'n/' }) do fields[#fields + 1] = kind .. member end
    end
  end
  call_with('ZREM', slot.work, members)
  call_with('HDEL', slot.items, fields)
  -- It was counted as published, and is dead from now on: the two together must stay what is settled.
  redis.call('HINCRBY', PROGRESS, 'published:' .. slot.index, -1)
  redis.call('HINCRBY', PROGRESS, 'waiting:' .. slot.index, -num_rows(batch))
  note_death(slot, id, batch, reason, attempts, { field = 'rollouts', bytes = rollouts })
  return #members
end
