-- Tasks: work that a request or the clock starts (broker/task_store.py). The records here are what is true; Celery's
-- messages only say that there may be one to begin. Keys, all of the server:
--   onbeat:task:ID      hash   kind queue job who arguments (TaskArguments) state reason created_ms started_ms ended_ms
--                              attempts worker turn (number of its newest attempt, which no other has), lease_until,
--                              cancel, progress (TaskProgress), result (TaskResult), entry (of the clock), same (its
--                              field in task_names)
--   onbeat:tasks        zset   task id -> the ms of its creation: every record that there is
--   onbeat:open_tasks   zset   task id that is queued or running -> the ms at which its message is sent again, or its
--                              lease is over
--   onbeat:task_names   hash   what is asked, by whom -> task id: a request that comes again is answered the same task
--                              while it is open
--   onbeat:task_counts  hash   'STATE KIND' -> how many have ended so; 'ms KIND' -> how long their last attempts took
--                              together
--   onbeat:clock        hash   owner, lease_until, entries (packed ClockEntry list); of each entry 'last NAME' (ms of
--                              its newest task's creation), 'task NAME' (that task), 'failed NAME' (the newest one
--                              before it that failed), 'done NAME' (ms at which one was done last) and 'place NAME'
--                              (how far its work has come, where the next one goes on)

-- create_task: {task_id, kind, queue, who, entry, interval_ms, phase_ms, max_waiting, max_kept}
-- Creates a task, unless the same one is open.
--   task_id      The id that a new task gets.
--   kind         The kind of the task.
--   queue        The queue that it waits in.
--   who          The name of the key that asks for it.
--   entry        The clock's entry that it is a run of, or ''.
--   interval_ms  How long a period of the entry is, at least 1.
--   phase_ms     When its first period begins, in ms of Unix time.
--   max_waiting  Most tasks that wait in a queue.
--   max_kept     Most records of tasks.
--   payloads     TaskArguments, JobEvent or ''
--   -> {created, id}
--    | {already, id}                        the same task is open
--    | {full, how many wait in the queue}
--    | {early, ms of the period's end}      the entry was run in this period
-- A clock's entry is run once in each of its periods, however many clocks ask.
-- Keys:
--   onbeat:task:ID      written: the new task; read: queues and states; removed: the oldest ended ones
--   onbeat:tasks        written: the task by its creation; removed: those whose records go
--   onbeat:open_tasks   read: how many wait in the queue; written: when the task's message is sent again
--   onbeat:task_names   read: the same task where it is open; written: the new one
--   onbeat:clock        read and written: last, task and failed of the entry
--   job, events         read: whether the job exists; written: JobEvent
local arguments = payload()
local event = payload()
local now = now_ms()
if a.entry ~= '' then
  local last = tonumber(redis.call('HGET', CLOCK, 'last ' .. a.entry)) or 0
  -- Periods are counted from the phase; two runs in the same one are one too many.
  local period = math.floor((now - a.phase_ms) / a.interval_ms)
  if last > 0 and period == math.floor((last - a.phase_ms) / a.interval_ms) then
    return { 'early', whole((period + 1) * a.interval_ms + a.phase_ms) }
  end
end
-- The client's repeat after a lost answer, or the entry's task of the period before.
-- `same` is the field in task_names: what is asked, and by whom.
local same = a.kind .. ' ' .. a.queue .. ' ' .. a.who .. ' ' .. arguments
local open = redis.call('HGET', TASK_NAMES, same)
if open then
  if a.entry ~= '' then redis.call('HSET', CLOCK, 'last ' .. a.entry, whole(now)) end
  return { 'already', open }
end
local num_waiting = 0
for _, id in ipairs(redis.call('ZRANGE', OPEN_TASKS, 0, -1)) do
  local queue, state = unpack(redis.call('HMGET', task_key(id), 'queue', 'state'))
  if queue == a.queue and state == 'queued' then num_waiting = num_waiting + 1 end
end
if num_waiting >= a.max_waiting then return { 'full', num_waiting } end
redis.call('HSET', task_key(a.task_id), 'kind', a.kind, 'queue', a.queue, 'job', JOB_ID, 'who', a.who,
  'arguments', arguments, 'state', 'queued', 'created_ms', whole(now), 'attempts', 0, 'turn', 0, 'entry', a.entry,
  'same', same)
redis.call('ZADD', TASKS, whole(now), a.task_id)
redis.call('ZADD', OPEN_TASKS, whole(now + RESEND_MS), a.task_id)
redis.call('HSET', TASK_NAMES, same, a.task_id)
if a.entry ~= '' then
  -- Of an entry that runs each minute two runs are kept, the newest and the newest that failed: all of them would push
  -- out what people have asked for.
  local before = redis.call('HGET', CLOCK, 'task ' .. a.entry)
  local ended = before and redis.call('HGET', task_key(before), 'state')
  if ended == 'failed' then
    local failed = redis.call('HGET', CLOCK, 'failed ' .. a.entry)
    redis.call('HSET', CLOCK, 'failed ' .. a.entry, before)
    before = failed
  end
  if before and ended and TASK_ENDED[ended] then
    redis.call('UNLINK', task_key(before))
    redis.call('ZREM', TASKS, before)
  end
  redis.call('HSET', CLOCK, 'last ' .. a.entry, whole(now), 'task ' .. a.entry, a.task_id)
end
tell_of_task(event)
-- The oldest ended ones make room.
local num_over = redis.call('ZCARD', TASKS) - a.max_kept
-- Oldest first, with as many more as may be open among them: those are passed over.
for _, id in ipairs(num_over > 0 and redis.call('ZRANGE', TASKS, 0, num_over + a.max_waiting) or {}) do
  if num_over > 0 and not redis.call('ZSCORE', OPEN_TASKS, id) then
    redis.call('UNLINK', task_key(id))
    redis.call('ZREM', TASKS, id)
    num_over = num_over - 1
  end
end
return { 'created', a.task_id }

-- begin_task: {task_id, worker, lease_ms, max_attempts}
-- Begins a task under a lease.
--   task_id       The task.
--   worker        The process that would run it, one task of each queue at a time.
--   lease_ms      How long the lease lasts.
--   max_attempts  Attempts after which it is begun only to be failed.
--   -> {begun, turn, attempts, kind, job, who, TaskArguments}
--    | {exhausted, the same}   its attempts are used up: it is begun to be failed
--    | {ended, state}
--    | {held}                  another worker runs it
--    | {busy}                  this worker runs another task of its queue
--    | {unknown}
-- Keys:
--   onbeat:task:ID      read: state, lease and attempts; written: the attempt; read of other tasks: what the worker
--                       runs
--   onbeat:open_tasks   read: what is open; written: the end of the lease, or when the message is sent again
local key = task_key(a.task_id)
local now = now_ms()
local of_task =
  redis.call('HMGET', key, 'state', 'queue', 'lease_until', 'attempts', 'turn', 'kind', 'job', 'who', 'arguments')
local state, queue, lease_until, attempts, turn, kind, job, who, arguments = unpack(of_task)
if not state then return { 'unknown' } end
if TASK_ENDED[state] then return { 'ended', state } end
-- At the very end of a lease it counts as over, here as in `due_tasks`.
if state == 'running' and (tonumber(lease_until) or 0) > now then return { 'held' } end
for _, id in ipairs(redis.call('ZRANGE', OPEN_TASKS, 0, -1)) do
  local of_other = redis.call('HMGET', task_key(id), 'worker', 'queue', 'state', 'lease_until')
  local worker, its_queue, its_state, its_end = unpack(of_other)
  if worker == a.worker and its_queue == queue and its_state == 'running' and (tonumber(its_end) or 0) > now then
    redis.call('ZADD', OPEN_TASKS, whole(now + RESEND_MS), a.task_id)
    return { 'busy' }
  end
end
attempts = tonumber(attempts) or 0
turn = (tonumber(turn) or 0) + 1
local is_exhausted = attempts >= a.max_attempts
if not is_exhausted then attempts = attempts + 1 end
redis.call('HSET', key, 'state', 'running', 'attempts', attempts, 'turn', turn, 'worker', a.worker,
  'started_ms', whole(now), 'lease_until', whole(now + a.lease_ms), 'progress', '')
redis.call('ZADD', OPEN_TASKS, whole(now + a.lease_ms), a.task_id)
return { is_exhausted and 'exhausted' or 'begun', turn, attempts, kind or '', job or '', who or '', arguments or '' }

-- renew_task: {task_id, turn, lease_ms}
-- Begins the lease of an attempt anew.
--   task_id   The task.
--   turn      The number of the attempt.
--   lease_ms  How long the lease lasts.
--   payload   TaskProgress
--   -> {renewed, 1 where the task was asked to end, else 0}
--    | {lost}   another attempt has taken its place
-- Keys:
--   onbeat:task:ID      read: state, turn, cancel; written: lease_until, progress
--   onbeat:open_tasks   written: the end of the lease
local key = task_key(a.task_id)
local now = now_ms()
local progress = payload()
local state, turn, cancel = unpack(redis.call('HMGET', key, 'state', 'turn', 'cancel'))
if state ~= 'running' or tonumber(turn) ~= a.turn then return { 'lost' } end
redis.call('HSET', key, 'lease_until', whole(now + a.lease_ms), 'progress', progress)
redis.call('ZADD', OPEN_TASKS, whole(now + a.lease_ms), a.task_id)
return { 'renewed', cancel == '1' and 1 or 0 }

-- end_task: {task_id, turn, state, reason, uncounted}
-- Ends an attempt, and with it the task unless another attempt is to follow.
--   task_id    The task.
--   turn       The number of the attempt.
--   state      done, failed or cancelled; queued where another attempt is to follow.
--   reason     Why, for people.
--   uncounted  True where the attempt doesn't count, since its end was not its fault.
--   payloads   TaskProgress, TaskResult or '', JobEvent or ''
--   -> {ended, id of the oldest task that waits in its queue, or ''}
--    | {lost}   another attempt has taken its place
-- Only the newest attempt ends a task: one that was taken for dead changes nothing.
-- Keys:
--   onbeat:task:ID       read: the attempt; written: its outcome; read of other tasks: which one waits longest
--   onbeat:open_tasks    removed, or written: now, where another attempt follows; the next of the queue is looked at
--                        later
--   onbeat:task_names    removed: the same may be asked again
--   onbeat:task_counts   written: 'STATE KIND' and 'ms KIND'
--   onbeat:clock         written: done of the entry
--   job, events          read: whether the job exists; written: JobEvent
local key = task_key(a.task_id)
local now = now_ms()
local progress = payload()
local result = payload()
local event = payload()
local of_task =
  redis.call('HMGET', key, 'state', 'turn', 'attempts', 'kind', 'queue', 'started_ms', 'same', 'entry', 'cancel')
local state, turn, attempts, kind, queue, started, same, entry, cancel = unpack(of_task)
if state ~= 'running' or tonumber(turn) ~= a.turn then return { 'lost' } end
kind = kind or ''
queue = queue or ''
same = same or ''
entry = entry or ''
local becomes = a.state
-- A task that was cancelled meanwhile gets no other attempt.
if becomes == 'queued' and cancel == '1' then becomes = 'cancelled' end
redis.call('HSET', key, 'state', becomes, 'reason', a.reason, 'progress', progress, 'lease_until', 0)
if becomes == 'queued' then
  -- `begin_task` has counted it: less that one.
  if a.uncounted then redis.call('HSET', key, 'attempts', math.max(0, (tonumber(attempts) or 0) - 1)) end
  redis.call('ZADD', OPEN_TASKS, whole(now), a.task_id)
else
  redis.call('HSET', key, 'ended_ms', whole(now), 'result', result)
  close_task(a.task_id, becomes, kind, same)
  -- ms of the last attempt, never negative where a clock stepped back.
  redis.call('HINCRBY', TASK_COUNTS, 'ms ' .. kind, whole(math.max(0, now - (tonumber(started) or now))))
  if becomes == 'done' and entry ~= '' then redis.call('HSET', CLOCK, 'done ' .. entry, whole(now)) end
  tell_of_task(event)
end
return { 'ended', oldest_waiting(queue, becomes == 'queued' and a.task_id or '') }

-- cancel_task: {task_id, reason}
-- Ends a task that waits; one that runs is told at its next renewal.
--   task_id  The task.
--   reason   Why, for people.
--   payload  JobEvent or ''
--   -> {cancelled} | {cancelling} | {ended, state} | {unknown}
-- Keys:
--   onbeat:task:ID       read: state and lease; written: `cancel`, and the outcome where no worker runs it
--   onbeat:open_tasks    removed, where no worker runs it
--   onbeat:task_names    removed, where no worker runs it
--   onbeat:task_counts   written: 'cancelled KIND'
--   job, events          read: whether the job exists; written: JobEvent
local key = task_key(a.task_id)
local event = payload()
local state, kind, same, lease_until = unpack(redis.call('HMGET', key, 'state', 'kind', 'same', 'lease_until'))
if not state then return { 'unknown' } end
if TASK_ENDED[state] then return { 'ended', state } end
if state == 'running' and (tonumber(lease_until) or 0) > now_ms() then
  redis.call('HSET', key, 'cancel', 1)
  return { 'cancelling' }
end
redis.call('HSET', key, 'state', 'cancelled', 'reason', a.reason, 'ended_ms', whole(now_ms()), 'cancel', 1)
close_task(a.task_id, 'cancelled', kind or '', same or '')
tell_of_task(event)
return { 'cancelled' }

-- due_tasks: {most}
-- Lists the tasks whose message may be lost, and queues those again whose worker is gone.
--   most   Most tasks of one call.
--   -> {due, n x (task id, queue)}
-- A record that another program has damaged is let go of: it must not keep the others from being found.
-- Keys:
--   onbeat:open_tasks    read: what is due, oldest first; written: when it is looked at next; removed: what has ended
--   onbeat:task:ID       read: state, queue, worker, lease_until, cancel; written: queued, failed or cancelled
--   onbeat:task_names    removed: of a task that ends here
--   onbeat:task_counts   written: of a task that ends here
local now = now_ms()
local out = { 'due' }
for _, id in ipairs(redis.call('ZRANGEBYSCORE', OPEN_TASKS, '-inf', whole(now), 'LIMIT', 0, math.min(a.most, 100))) do
  local record = string.match(id, '^task%-%x%x%x%x%x%x%x%x%x%x%x%x$')
    and redis.pcall('HMGET', task_key(id), 'state', 'queue', 'worker', 'lease_until', 'cancel', 'kind', 'same') or {}
  local state, queue, worker, lease_until, cancel, kind, same = unpack(record.err and {} or record)
  if not state or TASK_ENDED[state] then
    redis.call('ZREM', OPEN_TASKS, id)
  elseif not (kind and HAS_QUEUE[string.match(queue or '', '^%l+')]) then
    redis.call('HSET', task_key(id), 'state', 'failed', 'reason', 'its record is damaged', 'ended_ms', whole(now))
    close_task(id, 'failed', kind or '', same or '')
  elseif state == 'running' and (tonumber(lease_until) or 0) > now then
    redis.call('ZADD', OPEN_TASKS, lease_until, id)
  elseif state == 'running' and cancel == '1' then
    redis.call('HSET', task_key(id), 'state', 'cancelled', 'reason', 'it was asked to end', 'ended_ms', whole(now))
    close_task(id, 'cancelled', kind, same or '')
  else
    if state == 'running' then
      local reason = 'worker ' .. (worker or '') .. ' ended while it ran'
      redis.call('HSET', task_key(id), 'state', 'queued', 'reason', reason)
    end
    redis.call('ZADD', OPEN_TASKS, whole(now + RESEND_MS), id)
    out[#out + 1] = id
    out[#out + 1] = queue
  end
end
return out

-- hold_clock: {owner, lease_ms, names}
-- Takes the clock, or begins its lease anew. Several clocks may run at once; one of them ticks.
--   owner     The process that would tick.
--   lease_ms  How long the lease lasts.
--   names     name -> true, of the clock's entries
--   payload   a packed list of ClockEntry
--   -> {held, 1 where the clock is the owner's, else 0}
-- Keys:
--   onbeat:clock   read and written: owner, lease_until; written: entries; removed: fields of entries that are gone for
--                  30 days
local entries = payload()
local now = now_ms()
local owner, lease_until = unpack(redis.call('HMGET', CLOCK, 'owner', 'lease_until'))
-- ms that the owner's lease has left.
local left = (tonumber(lease_until) or 0) - now
-- A lease from before a clock stepped back counts as over.
if owner and owner ~= a.owner and left > 0 and left <= 10 * a.lease_ms then return { 'held', 0 } end
redis.call('HSET', CLOCK, 'owner', a.owner, 'lease_until', whole(now + a.lease_ms), 'entries', entries)
-- An entry that there hasn't been for long, as of a host that is gone, is forgotten.
for _, field in ipairs(redis.call('HKEYS', CLOCK)) do
  local name = string.match(field, '^last (.*)$')
  if name and not a.names[name] and now - (tonumber(redis.call('HGET', CLOCK, field)) or 0) > FORGOTTEN_MS then
    redis.call('HDEL', CLOCK, field, 'task ' .. name, 'failed ' .. name, 'done ' .. name, 'place ' .. name)
  end
end
return { 'held', 1 }

-- send_message: {queue, max_waiting}
-- Sends a message of Celery's.
--   queue        The queue, whose list of Redis it goes to.
--   max_waiting  Most messages that wait in it.
--   payload      the message
--   -> {sent} | {full}
-- Celery's own way refuses at maxmemory; tasks that free memory must still be heard of. So it is bounded here, in
-- number and length.
-- Keys:
--   onbeat:celery:QUEUE   read: its length; written: the message, which Celery's workers take from the other end
local message = payload()
if type(a.queue) ~= 'string' or not string.match(a.queue, '^[%w@._-]+$') then return error('not a queue') end
local key = 'onbeat:celery:' .. a.queue
if redis.call('LLEN', key) >= math.min(a.max_waiting, 1000) then return { 'full' } end
-- Celery's workers take from the right end (BRPOP): the oldest message goes first.
redis.call('LPUSH', key, message)
return { 'sent' }
