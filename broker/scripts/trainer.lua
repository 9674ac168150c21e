-- What a trainer calls (broker/trainer_side.py): its lease, the open iterations, the versions of the weights. What is
-- told an epoch first runs behind `as_trainer`.

-- acquire_trainer: {owner, lease_ms, sealed}
-- Gives a trainer the job, under a new epoch.
--   owner     The name of this life of the trainer: a repeat by the same owner keeps its epoch.
--   lease_ms  How long the lease lasts.
--   sealed    The number of the hosts whose ranks it leads, which has to be that of those that stand; 0 where one host
--             has all.
--   -> {acquired, epoch}
--    | {held, ms left}       another trainer's lease lives
--    | {no_group, reason}    the hosts are no group any more
--    | {unknown}             no such job
-- The epoch comes from the clock as well, so that a lost second of writes can't hand one out twice.
-- Keys:
--   job     read: whether the job exists
--   hosts   read: the number of the sealed group; written: a group that has lost a member ends here
--   fence   read and written: epoch, owner, lease_until; written: lease_ms, num_slots
if redis.call('EXISTS', JOB) == 0 then return { 'unknown' } end
local hosts = standing_hosts()
local now = now_ms()
if hosts.sealed ~= a.sealed then return { 'no_group', hosts.reason } end
local last_epoch, owner, lease_until = unpack(redis.call('HMGET', FENCE, 'epoch', 'owner', 'lease_until'))
-- ms that the holder's lease has left; negative once it is over.
local left = (tonumber(lease_until) or 0) - now
local is_mine = owner == a.owner
if left > 2 * a.lease_ms and not is_mine then
  -- The clock stepped back: a holder that lives says so within a lease, a dead one must not hold for as long as the
  -- step.
  left = a.lease_ms
  redis.call('HSET', FENCE, 'lease_until', whole(now + a.lease_ms))
end
if left > 0 and not is_mine then return { 'held', left } end
local epoch = tonumber(last_epoch) or 0
-- A number grows with each trainer and is not below the clock in ms: see above.
if not is_mine then epoch = math.max(epoch + 1, now) end
redis.call('HSET', FENCE, 'epoch', whole(epoch), 'owner', a.owner, 'lease_until', whole(now + a.lease_ms),
  'lease_ms', whole(a.lease_ms), 'num_slots', whole(num_slots()))
return { 'acquired', whole(epoch) }

-- renew_trainer: {epoch, lease_ms}
-- Begins a trainer's lease anew, or gives it back.
--   epoch     The trainer's epoch.
--   lease_ms  How long the lease lasts; 0 gives it back.
--   -> {renewed, the job's state} | {fenced}
-- Keys:
--   fence   read: epoch; written: lease_until, and `owner` where the lease is given back
--   job     read: `state`, for the answer
if a.lease_ms == 0 then
  redis.call('HSET', FENCE, 'lease_until', '0', 'owner', '')
else
  redis.call('HSET', FENCE, 'lease_until', whole(now_ms() + a.lease_ms))
end
return { 'renewed', redis.call('HGET', JOB, 'state') or '' }

-- open_iteration: {epoch, opening, versions}
-- Opens an iteration.
--   epoch     The trainer's epoch.
--   opening   The iteration and its first batches, as the prelude has it.
--   versions  A list of {version, digest}, of those that may sample the window.
--   payloads  a PromptBatch for each of opening.batches
--   -> {opened} | {already_open} | {fenced}
--    | {out_of_order, newest iteration}   it is not the next one, or the window is full
--    | {no_manifest}                      a version that samples it was not announced
-- Keys:
--   fence                   read and written: the window, and the versions that sample it
--   weights                 read: each version needs its manifest
--   prompts, ledger, work   written: the first batches of the iteration, free for their first attempts
--   rollouts                written: an empty stream with the group `trainers`
--   items, claims           removed: an older Onbeat may have left something in the slot
--   progress                written: published:S and dead:S, both 0; removed: waiting:S
--   waiting                 removed: the generators that are woken
--   onbeat:wake:W           channel: calls a generator that waits
local fence = read_fence()
local stands = open_at(fence, a.opening.iteration)
local is_same = stands and stands.oldest_version == a.opening.oldest_version
for _, version in ipairs(a.versions) do
  local known = digest_of(fence, version.version)
  -- A version that has left the window's list says nothing; other weights of one that stands are another opening.
  is_same = is_same and (known == nil or known == version.digest)
end
if is_same then return { 'already_open' } end
if not is_next(fence, a.opening) then return { 'out_of_order', newest_iteration(fence) } end
for _, version in ipairs(a.versions) do
  local fault = add_version(fence, version)
  if fault then return { fault, newest_iteration(fence) } end
end
if not is_samplable(fence, a.opening) then return { 'no_manifest' } end
-- An older Onbeat may have left its iteration there.
clear_slot(slot_of(a.opening.iteration))
open(fence, a.opening)
write_fence(fence)
return { 'opened' }

-- dispatch: {epoch, iteration, batches}
-- Puts batches of an open iteration in work.
--   epoch      The trainer's epoch.
--   iteration  The iteration.
--   batches    A list of {id, shape, version}; version is the only one that may sample it, or none.
--   payloads   a PromptBatch for each of batches
--   -> {dispatched, how many} | {fenced} | {wrong_iteration, newest iteration}
--    | {no_manifest}   a version that alone may sample a batch was not announced
-- What an opening had no room for or no version yet, and what a restart has lost: an expected batch that is nowhere
-- goes in work.
-- Keys:
--   fence           read: the open iterations, and the versions that sample them
--   ledger          read: batches that are expected already; written: `expected`
--   prompts, work   read: batches that a restart has lost; written: what goes in work
--   items, claims   removed: the last claim of a batch that is sent again
--   waiting         removed: the generators that are woken
--   counters        written: redispatched
--   onbeat:wake:W   channel: calls a generator that waits
local fence = read_fence()
if not open_at(fence, a.iteration) then return { 'wrong_iteration', newest_iteration(fence) } end
if not are_versions_known(fence, a.batches) then return { 'no_manifest' } end
local slot = slot_of(a.iteration)
-- The batches that go in work, and how many of them the ledger had already.
local lost = {}
local again = 0
for _, batch in ipairs(a.batches) do
  batch.prompts = payload()
  if is_lost(slot, batch.id) then
    if redis.call('HEXISTS', slot.ledger, batch.id) == 1 then
      drop_prompt(slot, batch.id)
      again = again + 1
    end
    lost[#lost + 1] = batch
  end
end
expect(slot, lost)
wake(0, #lost)
if again > 0 then count('redispatched', again) end
return { 'dispatched', #lost }

-- reconcile: {epoch, iteration, batch_ids}
-- Lists the batches of an open iteration that are neither settled nor in work.
--   epoch      The trainer's epoch.
--   iteration  The iteration.
--   batch_ids  The batches that are looked up, where the iteration is not whole.
--   -> {whole} | {lost, n x batch id} | {fenced} | {wrong_iteration, newest iteration}
-- It writes nothing. An iteration is whole when its counts agree, and then its batches aren't looked at: a trainer that
-- waits asks every other second, of any number of batches.
-- Keys:
--   fence          read: epoch, and how many batches the iteration expects
--   progress       read: published:S and dead:S
--   work, ledger   read: their sizes, and where these don't agree each batch
--   prompts        read: a batch without its prompts is lost
local fence = read_fence()
local open = open_at(fence, a.iteration)
if not open then return { 'wrong_iteration', newest_iteration(fence) } end
local slot = slot_of(a.iteration)
local settled = progress(slot)
-- The batches that should be in work: those that are neither published nor dead.
local left = open.expected - settled.published - settled.dead
-- Stage 0 alone, free or leased: the scores of stage 1 begin at 2^42.
local num_there = redis.call('ZCOUNT', slot.work, 0, score_of(1, -1))
if redis.call('HLEN', slot.ledger) == open.expected and num_there == left then return { 'whole' } end
local out = { 'lost' }
for _, id in ipairs(a.batch_ids) do
  if is_lost(slot, id) then out[#out + 1] = id end
end
return out

-- claim_rollouts: {epoch, iteration, max_batches, last_entry, read_ahead}
-- Gives the trainer published batches of an open iteration, in the order of their arrival.
--   epoch        The trainer's epoch.
--   iteration    The iteration.
--   max_batches  Most batches of one call.
--   last_entry   The newest entry of its slot that this trainer has; '0-0' of none, when it takes over.
--   read_ahead   The entries after it that this trainer has read while it waited.
--   -> {claimed, dead count, the kind of engine that sampled them or '', n x (entry, payload, digest, batch id)}
--    | {fenced} | {wrong_iteration, newest iteration}
-- A payload is megabytes. It comes as '' where the trainer has read it already, and as nil where the batch has columns:
-- the trainer reads it next to them.
-- A repeat after a lost answer gives the same again: what is pending after the last entry comes before what is new.
-- Keys:
--   fence      read: epoch, and the open iterations
--   progress   read: dead:S and engine
--   rollouts   read: entries; written: they are pending for this epoch, as the group's consumer, until their
--              iteration's commit
local fence = read_fence()
if not open_at(fence, a.iteration) then return { 'wrong_iteration', newest_iteration(fence) } end
local slot = slot_of(a.iteration)
local out = { 'claimed', tonumber(redis.call('HGET', PROGRESS, 'dead:' .. slot.index)) or 0, engine_of_job() or '' }
if redis.call('EXISTS', slot.rollouts) == 0 then return out end
local trainer = whole(a.epoch) -- the name of the group's consumer
local last = a.last_entry
local left = a.max_batches -- how many more may be given
local function give(entry, batch, digest, id)
  local num = #out
  out[num + 1] = entry
  out[num + 2] = batch
  out[num + 3] = digest
  out[num + 4] = id
  left = left - 1
end
local function add(from)
  if left <= 0 then return end
  local read = redis.call('XREADGROUP', 'GROUP', 'trainers', trainer, 'COUNT', left, 'STREAMS', slot.rollouts, from)
  for _, row in ipairs(read and read[1][2] or {}) do
    if row[2] then
      local entry = entry_of(row)
      give(entry.id, entry.batch or false, entry.digest, entry.batch_id)
    end
  end
end
if last == '0-0' then
  -- From the beginning, and whatever its idle time: all that an earlier epoch claimed and didn't commit is this one's.
  -- Without COUNT only 100 entries would come. 10,000 is the bound of an iteration's batches (MAX_BATCHES of
  -- contracts/encoding/wire.py), and each batch has at most one entry: this call takes them all.
  redis.call('XAUTOCLAIM', slot.rollouts, 'trainers', trainer, '0', '0', 'COUNT', '10000', 'JUSTID')
end
-- Where a restart has forgotten that the last entry was given, nothing is passed over: it would never be given again.
local is_given = last == '0-0' or #redis.call('XPENDING', slot.rollouts, 'trainers', last, last, '1') == 1
-- As XREADGROUP would deliver them, without a look at their payloads.
local read = is_given and { unpack(a.read_ahead, 1, math.min(left, #a.read_ahead)) } or {}
if #read > 0 then
  -- The options of XCLAIM come after the ids. LASTID sets the group's last delivered entry: the last of these ids.
  local last_read = read[#read]
  for _, word in ipairs({ 'FORCE', 'JUSTID', 'LASTID', last_read }) do read[#read + 1] = word end
  for _, id in ipairs(redis.call('XCLAIM', slot.rollouts, 'trainers', trainer, '0', unpack(read))) do
    give(id, '', '', '')
  end
  -- What came meanwhile the next wait brings: here it would be copied twice more.
  if #out > 3 then return out end
end
-- First what is pending behind the last entry, then what no trainer has been given.
add(last)
add('>')
return out

-- commit_iteration: {epoch, iteration, digest, previous, trained, made, opening, engine}
-- Commits the oldest open iteration, once its ledger is complete, and opens the next one.
--   epoch      The trainer's epoch.
--   iteration  The iteration.
--   digest     The digest of its audit record.
--   previous   The digest of the record that it follows.
--   trained    batch id -> digest, of each batch that was trained
--   made       {version, digest} that the iteration has made, or none.
--   opening    The iteration to open, as the prelude has it, or none.
--   engine     The kind of engine that sampled what this trainer has claimed, of a deterministic job.
--   payloads   AuditRecord, JobEvent or '', then a PromptBatch for each of opening.batches
--   -> {committed} | {already_committed} | {fenced}
--    | {wrong_iteration, oldest open}
--    | {broken_link}                      the record doesn't follow the newest one
--    | {missing, batch id}                a batch of the ledger was not trained
--    | {divergent, batch id}              a batch was trained that the ledger doesn't have so
--    | {out_of_order, newest iteration}
--    | {no_manifest}
--    | {wrong_engine, the kind that samples the job}   a restart has forgotten the first one, and another came
-- It checks everything first, and writes then: a script doesn't roll back.
-- Keys:
--   fence                          read and written: committed, the window and its versions
--   ledger                         read: each batch, held against what was trained; removed
--   audit                          read: the newest link of the chain; written: AuditRecord and its digest
--   weights                        read: the versions that sample need their manifests
--   progress                       written: engine, where a restart has forgotten it; removed: waiting:S; of an opening
--                                  as `open_iteration`
--   rollouts                       trimmed: the payloads of the iteration, which frees their memory
--   prompts, claims, work, items   removed: all of the slot; of an opening written as `open_iteration`
--   events                         written: JobEvent
--   waiting                        removed: the generators that an opening wakes
local fence = read_fence()
if fence.committed >= a.iteration then return { 'already_committed' } end
local oldest = table.remove(fence.window, 1)
local oldest_iteration = oldest and oldest.iteration or fence.committed
if not oldest or oldest.iteration ~= a.iteration then return { 'wrong_iteration', oldest_iteration } end
if a.previous ~= last_link() then return { 'broken_link' } end
local engine = engine_of_job()
if is_other_engine(engine, a.engine) then return { 'wrong_engine', engine } end
local slot = slot_of(a.iteration)
-- A list of field, value, field, value: twice as long as the ledger has batches.
local ledger = redis.call('HGETALL', slot.ledger)
-- Batches of an opening that never came: a trainer that lacks them can't have trained them.
if #ledger / 2 ~= oldest.expected then return { 'missing', 'dispatch' } end
local trained = a.trained
for i = 1, #ledger, 2 do
  local id = ledger[i]
  local batch = unpacked(ledger[i + 1]) or {}
  -- I3: each batch is trained as it was published. One that is still expected but was trained is of a server that came
  -- back older:
  -- its publication was lost, and the trainer has the batch.
  if batch.state ~= 'dead' then
    if not trained[id] then return { 'missing', id } end
    if batch.state == 'published' and batch.digest ~= trained[id] then return { 'divergent', id } end
  elseif trained[id] then
    return { 'divergent', id }
  end
  -- What is left after the loop was trained and isn't in the ledger.
  trained[id] = nil
end
local extra = next(trained)
if extra then return { 'divergent', extra } end
-- The fence in memory only, from which the checks below are made: it is written at the end.
fence.committed = a.iteration
-- Iteration t makes version t + 1. Where it only evaluated it makes none.
local is_in_order = (not a.made or a.made.version == a.iteration + 1) and (not a.opening or is_next(fence, a.opening))
if not is_in_order then return { 'out_of_order', newest_iteration(fence) } end
local fault = a.made and add_version(fence, a.made)
if fault then return { fault, newest_iteration(fence) } end
if a.opening and not is_samplable(fence, a.opening) then return { 'no_manifest' } end
local record = payload()
local event = payload()
keep_engine(engine, a.engine)
clear_slot(slot)
redis.call('XADD', AUDIT, '*', 'record', record, 'digest', a.digest)
if event ~= '' then tell(event) end
if a.opening then open(fence, a.opening) end
write_fence(fence)
return { 'committed' }

-- rewind: {epoch, iteration, digest, previous}
-- Takes the fence back to an earlier iteration.
--   epoch      The trainer's epoch.
--   iteration  The iteration that is the next to open.
--   digest     The digest of the rewind's record.
--   previous   The digest of the record that it follows.
--   payloads   AuditRecord, JobEvent
--   -> {rewound} | {already_rewound} | {fenced}
--    | {out_of_order, committed}   it would leave a gap
--    | {broken_link}               the record doesn't follow the newest one
-- The trainer resumes from a checkpoint that is older than the fence: what came after is done again under this epoch,
-- and the versions that it made are announced no more.
-- Keys:
--   fence                  read and written: committed, and an empty window without versions
--   audit                  read: the newest link of the chain; written: AuditRecord and its digest
--   weights, probes        removed: the versions that are made again
--   the six of each slot   removed; `rollouts` is trimmed, for its ids must grow
--   missing                written: who still holds a batch of these slots
--   claimers               removed: claims before the rewind are not repeated
--   progress               removed: waiting:S
--   events                 written: JobEvent
--   counters               written: rewinds
local fence = read_fence()
-- The iteration that stays the last committed one; -1 where the job begins again.
local before = a.iteration - 1
local last = last_link()
local is_repeated = last == a.digest and #fence.window == 0 and fence.committed == before
if is_repeated then return { 'already_rewound' } end
if before > fence.committed then return { 'out_of_order', fence.committed } end
if a.previous ~= last then return { 'broken_link' } end
close_window(before)
-- Newer versions are made again, maybe with other weights: until then no generator may read them ahead.
for _, version in ipairs(redis.call('HKEYS', WEIGHTS)) do
  -- Version a.iteration is what the next iteration begins with, and stays.
  if tonumber(version) > a.iteration then redis.call('HDEL', WEIGHTS, version) end
end
for _, field in ipairs(of_versions(redis.call('HKEYS', PROBES), a.iteration + 1, math.huge)) do
  redis.call('HDEL', PROBES, field)
end
redis.call('XADD', AUDIT, '*', 'record', payload(), 'digest', a.digest)
tell(payload())
count('rewinds')
return { 'rewound' }

-- restore_chain: {epoch, committed, digests, previous}
-- Gives audit records back that a restart has lost.
--   epoch      The trainer's epoch.
--   committed  The last iteration that stands after them.
--   digests    The digests of the records, oldest first.
--   previous   The digest of the record that the first of them follows.
--   payloads   an AuditRecord for each of digests
--   -> {restored} | {already_restored} | {fenced}
--    | {broken_link}   the first record doesn't follow the newest one
-- A server that came back older gets records back that it had accepted before: the run folder has them, and the weights
-- that they made. The fence goes on behind them, with nothing open.
-- Keys:
--   fence                  read and written: committed, and an empty window without versions
--   audit                  read: the newest link of the chain; written: the lost records, oldest first
--   the six of each slot   removed; `rollouts` is trimmed, for its ids must grow
--   missing                written: who still holds a batch of these slots
--   claimers               removed: claims before the restart are not repeated
--   progress               removed: waiting:S
local fence = read_fence()
local last = last_link()
local is_repeated = last == a.digests[#a.digests] and #fence.window == 0 and fence.committed == a.committed
if is_repeated then return { 'already_restored' } end
if a.previous ~= last then return { 'broken_link' } end
close_window(a.committed)
for _, digest in ipairs(a.digests) do
  redis.call('XADD', AUDIT, '*', 'record', payload(), 'digest', digest)
end
return { 'restored' }

-- record_files: {epoch}
-- Notes which objects are the files of the run.
--   epoch    The trainer's epoch.
--   payload  the list of the objects
--   -> {recorded} | {fenced}
-- Keys:
--   fence   read: epoch
--   files   written: the list of the objects
redis.call('SET', job_key('files'), payload())
return { 'recorded' }

-- publish_weights: {epoch, policy_version, oldest_kept, chunk_bytes}
-- Announces a version, and lets manifests of old ones go.
--   epoch           The trainer's epoch.
--   policy_version  The version.
--   oldest_kept     The oldest version whose manifest stays.
--   chunk_bytes     Bytes of the version in Redis, which the next one is expected to need as well.
--   payloads        WeightManifest; FenceProbe or '' for a version that needs no proof; the trainer's log-probs of the
--                   probe's rows, and those under the version before, '' of none
--   -> {published} | {fenced}
--    | {divergent, the digest that this version has}   the window is sampled with other weights of it
-- What may sample the window stays, also where a trainer counts on commits that a restart has lost: a claim must find
-- it.
-- Keys:
--   fence     read: epoch, the window and its versions; written: version_bytes
--   weights   written: WeightManifest; removed: those that nothing may ask for any more
--   probes    written: FenceProbe; removed with the manifests
--   proofs    removed: those of such versions
local fence = read_fence()
local manifest = payload()
local probe = payload()
local logprobs = payload()
local logprobs_before = payload()
local known = digest_of(fence, a.policy_version)
-- A restart may have lost the rewind of a trainer that lives, and which has made this version anew with other weights.
-- The manifest is packed bytes that nothing here decodes. A digest is plain text in them, so that a manifest of the
-- same weights contains it. (1, true: search from the first byte, and for the text itself, not for a pattern.)
if known and not string.find(manifest, known, 1, true) then return { 'divergent', known } end
redis.call('HSET', WEIGHTS, a.policy_version, manifest)
local version = whole(a.policy_version)
redis.call('HDEL', PROBES, version, version .. '/logprobs', version .. '/before')
if probe ~= '' then redis.call('HSET', PROBES, version, probe, version .. '/logprobs', logprobs) end
if logprobs_before ~= '' then redis.call('HSET', PROBES, version .. '/before', logprobs_before) end
redis.call('HSET', FENCE, 'version_bytes', whole(a.chunk_bytes))
-- The older of what the trainer keeps and what the window may still be sampled with.
local oldest = math.min(a.oldest_kept, fence.window[1] and fence.window[1].oldest_version or a.oldest_kept)
for _, version in ipairs(redis.call('HKEYS', WEIGHTS)) do
  if tonumber(version) < oldest then redis.call('HDEL', WEIGHTS, version) end
end
for _, field in ipairs(of_versions(redis.call('HKEYS', PROBES), 0, oldest - 1)) do redis.call('HDEL', PROBES, field) end
-- `first KIND` is of no version, and stays.
for _, field in ipairs(of_versions(redis.call('HKEYS', PROOFS), 0, oldest - 1)) do redis.call('HDEL', PROOFS, field) end
return { 'published' }

-- announce_shard: {epoch}
-- Announces a file of a version whose manifest is still to come.
--   epoch    The trainer's epoch.
--   payload  WeightShard
--   -> {announced} | {fenced}
-- A generator that misses one reads it with the rest of its version, so old ones may go.
-- Keys:
--   fence    read: epoch
--   shards   written: WeightShard; it is the name of a channel too, which calls who waits for the stream
local SHARDS = job_key('shards')
redis.call('XADD', SHARDS, 'MAXLEN', '~', '100', '*', 'shard', payload())
redis.pcall('PUBLISH', SHARDS, '')
return { 'announced' }

-- put_chunk: {epoch, field, keep_ms}
-- Puts a chunk of a version's file into Redis.
--   epoch    The trainer's epoch.
--   field    VERSION/FILE/N
--   keep_ms  The time without another chunk after which all chunks go.
--   payload  the chunk's bytes
--   -> {put} | {fenced} | OOM, at maxmemory
-- Where an open iteration has published batches its commit frees them, and the chunk is of the version that it needs:
-- it goes past the limit. A version that nothing waits for doesn't.
-- Keys:
--   fence      read: epoch, and the open iterations
--   progress   read: published:S, where the server is at maxmemory
--   chunks     written: VERSION/FILE/N -> bytes; the time to live is of the whole hash
local CHUNKS = job_key('chunks')
local fence = read_fence()
require_room(fence.window, 1)
redis.call('HSET', CHUNKS, a.field, payload())
-- The time to live is the whole hash's, and each chunk begins it anew.
redis.call('PEXPIRE', CHUNKS, whole(a.keep_ms))
return { 'put' }

-- drop_chunks: {epoch, oldest_kept, kept}
-- Removes the chunks of old versions.
--   epoch        The trainer's epoch.
--   oldest_kept  The oldest version that stays.
--   kept         Older versions that stay as well.
--   -> {dropped, how many chunks} | {fenced}
-- Keys:
--   fence    read: epoch
--   chunks   removed: the fields of old versions
local CHUNKS = job_key('chunks')
local stays = {}
for _, version in ipairs(a.kept) do stays[version] = true end
local dropped = 0
for _, field in ipairs(redis.call('HKEYS', CHUNKS)) do
  -- VERSION/FILE/N begins with the version.
  local version = tonumber(string.match(field, '^%d+'))
  if version < a.oldest_kept and not stays[version] then
    dropped = dropped + redis.call('HDEL', CHUNKS, field)
  end
end
return { 'dropped', dropped }
