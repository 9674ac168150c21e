-- What becomes of a job as a whole (broker/job_store.py, broker/removals.py).

-- create_job: {state, created_s, owner, idempotency_key, max_jobs, max_spec_bytes, max_own_jobs, max_own_spec_bytes}
-- Creates a job.
--   state               The state that it begins in.
--   created_s           Unix time in seconds.
--   owner               The name of the key that submits it, or ''.
--   idempotency_key     The key of its submission, or ''.
--   max_jobs            Most jobs of the stack, or none.
--   max_spec_bytes      Most bytes of all specs together, or none.
--   max_own_jobs        Most jobs of the owner, or none.
--   max_own_spec_bytes  Most bytes of the owner's specs, or none.
--   payloads            JobSpec, JobEvent
--   -> {created}
--    | {already}                    the job is there
--    | {removed}                    a removal took this id
--    | {full, limit, how many}      what there is too much of, and how many there are
-- A repeat after a lost answer changes nothing. An id that a removal took between the reservation of its key and this
-- call is not given again: a consumer is about to remove the files of that id.
-- A submission that is refused leaves nothing, its reservation neither: refusals may be without end. What a resume
-- changes of a spec is small, and counts as its first length.
-- Keys:
--   job, spec              written: the job's state and its JobSpec
--   events                 written: JobEvent
--   onbeat:jobs            read: how many there are; written: the job by the time of its creation
--   onbeat:active          written: the job, until a final state
--   onbeat:spec_bytes      read and written: bytes of all specs
--   onbeat:owners          read and written: jobs of the key, and bytes of their specs
--   onbeat:removed         read: an id whose files are still to go is not given again
--   onbeat:changes         written: consumers look for the job
--   onbeat:idempotency:K   removed, where the submission is refused
if redis.call('EXISTS', JOB) == 1 then return { 'already' } end
if redis.call('HEXISTS', REMOVED, JOB_ID) == 1 then return { 'removed' } end
local spec = payload()
local num_jobs = redis.call('ZCARD', JOBS)
local num_bytes = tonumber(redis.call('GET', SPEC_BYTES)) or 0
local num_own_jobs = tonumber(redis.call('HGET', OWNERS, a.owner .. ' jobs')) or 0
local num_own_bytes = tonumber(redis.call('HGET', OWNERS, a.owner .. ' bytes')) or 0
-- What there is too much of with this job: its limit, how many there are, how many come.
local full
for _, kind in ipairs({
  { 'jobs', a.max_jobs, num_jobs, 1 },
  { 'bytes of specs', a.max_spec_bytes, num_bytes, #spec },
  { 'jobs of this key', a.max_own_jobs, num_own_jobs, 1 },
  { 'bytes of specs of this key', a.max_own_spec_bytes, num_own_bytes, #spec },
}) do
  local what, limit, there, more = unpack(kind, 1, 4)
  -- The first limit that is passed is the one that is told.
  if limit and there + more > limit then full = full or { 'full', what, there } end
end
if full then
  drop_reservation(a.idempotency_key)
  return full
end
require_room({}, 1)
redis.call('SET', job_key('spec'), spec)
redis.call('INCRBY', SPEC_BYTES, #spec)
redis.call('HINCRBY', OWNERS, a.owner .. ' jobs', 1)
redis.call('HINCRBY', OWNERS, a.owner .. ' bytes', #spec)
redis.call('HSET', JOB, 'state', a.state, 'reason', '', 'created_s', a.created_s, 'idempotency_key', a.idempotency_key,
  'spec_bytes', #spec, 'owner', a.owner)
redis.call('ZADD', JOBS, a.created_s, JOB_ID)
redis.call('SADD', ACTIVE, JOB_ID)
tell(payload())
wake_consumers('asked')
return { 'created' }

-- set_state: {state, reason, fault, at_s, epoch, allowed}
-- Moves a job along its lifecycle; a final state clears what is in work.
--   state    The state to move to.
--   reason   Why, for people.
--   fault    The side on which the cause lies, of a job that fails; else ''.
--   at_s     Unix time in seconds.
--   epoch    The epoch of a trainer that moves it, or none.
--   allowed  state before -> true
--   payload  JobEvent
--   -> {set} | {already} | {refused, state} | {fenced}
-- An epoch comes from a trainer: one that was replaced, or slept through a resume, ends no other's run (I4).
-- Keys:
--   job                    read: state; written: state, reason, fault, started_s, ended_s
--   fence                  read: epoch of a trainer that calls; written by a final state: an empty window, and a new
--                          epoch where no trainer calls
--   onbeat:active          removed, by a final state
--   waiting, claimers      removed, by a final state
--   the six of each slot   removed by a final state; `rollouts` is trimmed
--   missing                written by a final state: who still holds a batch
--   progress               removed by a final state: waiting:S
--   events                 written: JobEvent
--   onbeat:changes         written: consumers look for the job, unless a trainer calls
local state = redis.call('HGET', JOB, 'state')
if not state then return { 'refused', 'unknown' } end
if a.epoch and not is_trainer() then return { 'fenced' } end
if state == a.state then return { 'already', state } end
if not a.allowed[state] then return { 'refused', state } end
redis.call('HSET', JOB, 'state', a.state, 'reason', a.reason, 'fault', a.fault)
-- Once: a job that is resumed began when it first ran.
if a.state == 'running' then redis.call('HSETNX', JOB, 'started_s', a.at_s) end
if ENDED[a.state] then
  redis.call('HSET', JOB, 'ended_s', a.at_s)
  redis.call('SREM', ACTIVE, JOB_ID)
  redis.call('DEL', WAITING)
  end_window()
  -- A caller that ends it from outside may do so beside a trainer that lives.
  if not a.epoch then end_epoch() end
end
if not a.epoch then wake_consumers('asked') end
tell(payload())
return { 'set', state }

-- resume_job: {allowed, num_records}
-- Queues an ended job again.
--   allowed      state that can be resumed -> true
--   num_records  The length of the audit chain, as the caller has read it.
--   payloads     the spec as the caller has read it, the new spec, horizons or '', JobEvent
--   -> {resumed} | {already} | {refused, state}
--    | {changed}   the spec or the chain is no longer as the caller has read it
-- Where nothing is committed nothing is left of what was sampled, so another kind of engine may begin.
-- Iterations that stand open go, with their dead batches: they are sampled again from the first batch.
-- Keys:
--   job                    read: state, health; written: state, reason, fault, trainer_starts, health_at_resume,
--                          horizons; removed: ended_s
--   spec                   read: it must be as the caller has read it; written: the new JobSpec
--   audit                  read: the length of the chain
--   fence                  written: a new epoch, which fences a sleeping trainer off, and an empty window
--   the six of each slot   removed; `rollouts` is trimmed
--   missing                written: who still holds a batch of these slots
--   claimers               removed: claims before the resume are not repeated
--   progress               removed: waiting:S, and `engine` where nothing is committed
--   onbeat:active          written: the job, until a final state
--   events                 written: JobEvent
--   onbeat:changes         written: consumers look for the job
local SPEC = job_key('spec')
local before = payload()
local after = payload()
local horizons = payload()
local event = payload()
local state = redis.call('HGET', JOB, 'state')
local spec = redis.call('GET', SPEC)
if not state or not spec then return { 'refused', 'unknown' } end
if state == 'queued' and spec == after then return { 'already' } end
if not a.allowed[state] then return { 'refused', state } end
if spec ~= before or redis.call('XLEN', AUDIT) ~= a.num_records then return { 'changed' } end
end_epoch()
end_window()
-- -1: nothing was committed.
if read_fence().committed < 0 then redis.call('HDEL', PROGRESS, 'engine') end
redis.call('SET', SPEC, after)
redis.call('SADD', ACTIVE, JOB_ID)
redis.call('HSET', JOB, 'state', 'queued', 'reason', '', 'fault', '', 'trainer_starts', 0, 'trainer_fault', '')
-- A health problem that it has by now ends it no more.
redis.call('HSET', JOB, 'health_at_resume', redis.call('HGET', JOB, 'health') or '')
if horizons ~= '' then redis.call('HSET', JOB, 'horizons', horizons) end
redis.call('HDEL', JOB, 'ended_s')
tell(event)
wake_consumers('asked')
return { 'resumed' }

-- remove_job: {idempotency_key, seen_ended_s}
-- Removes all keys of an ended job, and notes that its files are to go.
--   idempotency_key  The key of the job's submission, or ''.
--   seen_ended_s     The job's `ended_s` as the caller of a removal by age has read it, or none.
--   payload          Removal
--   -> {removed} | {refused, state} | {held, ms left of the trainer's lease} | {changed} | {unknown}
-- All keys of the job that keys.py lists go (what else has its tag, as of an Onbeat before any release, would take a
-- walk through the whole server): a call that comes late finds no fence, and is refused as stale or fenced off. So does
-- what is left of a job without a state. That its files are to go is noted in the same step: no death in between
-- forgets them.
-- Keys:
--   job                          read: state, ended_s, spec_bytes, owner; removed
--   fence                        read: lease_until, num_slots; removed
--   each other key of the job    removed: those without a slot, and the six of each slot
--   onbeat:removed               written: Removal, until the job's files are gone
--   onbeat:jobs, onbeat:active   removed: the job
--   onbeat:spec_bytes            written: less the bytes of the spec
--   onbeat:owners                written: less the job and its bytes; removed with the key's last job
--   onbeat:idempotency:K         removed, where it is of this job
--   onbeat:changes               written: consumers look for files to remove
local of_job = redis.call('HMGET', JOB, 'state', 'ended_s', 'spec_bytes', 'owner')
local state, ended_s, spec_bytes, owner = unpack(of_job, 1, 4)
if state and not ENDED[state] then return { 'refused', state } end
-- A trainer may be writing its last checkpoint.
local left = (tonumber(redis.call('HGET', FENCE, 'lease_until')) or 0) - now_ms()
if left > 0 then return { 'held', math.ceil(left) } end
if a.seen_ended_s and (not state or a.seen_ended_s ~= ended_s) then return { 'changed' } end
if state then redis.call('HSET', REMOVED, JOB_ID, payload()) end
redis.call('ZREM', JOBS, JOB_ID)
redis.call('SREM', ACTIVE, JOB_ID)
-- A repeat of its submission must not bring the same id back, over its old run folder; another job's key stays.
drop_reservation(a.idempotency_key)
if tonumber(spec_bytes) then
  local num_bytes = whole(tonumber(spec_bytes))
  redis.call('DECRBY', SPEC_BYTES, num_bytes)
  -- Of a key without a job nothing stays: names of keys may be without end.
  if redis.call('HINCRBY', OWNERS, (owner or '') .. ' jobs', -1) <= 0 then
    redis.call('HDEL', OWNERS, (owner or '') .. ' jobs', (owner or '') .. ' bytes')
  else
    redis.call('HINCRBY', OWNERS, (owner or '') .. ' bytes', '-' .. num_bytes)
  end
end
-- Each key by its name, since a walk by pattern would visit every key of the server.
local names = {}
local open_names = {
  'fence', 'weights', 'probes', 'audit', 'job', 'events', 'spec', 'chunks', 'shards', 'starting', 'files',
}
for _, name in ipairs(open_names) do
  names[#names + 1] = job_key(name)
end
local sealed_names = {
  'counters', 'dead', 'progress', 'buried', 'spans', 'claimers', 'waiting', 'missing', 'hosts', 'proofs',
}
for _, name in ipairs(sealed_names) do
  names[#names + 1] = sealed_key(name)
end
for index = 0, num_slots() - 1 do
  local slot = slot_at(index)
  for _, name in ipairs(SLOT_NAMES) do names[#names + 1] = slot[name] end
end
redis.call('UNLINK', unpack(names))
wake_consumers('removed')
return { state and 'removed' or 'unknown' }
