-- set_state: {state, reason, at_s, epoch, allowed}, payload JobEvent; epoch: of a trainer that moves
--   it, or none; allowed: state before -> true
--   -> {set} | {already} | {refused, state} | {fenced}
-- An epoch comes from a trainer: one that was replaced, or slept through a resume, ends no other's run (I4).
local state = redis.call('HGET', JOB, 'state')
if not state then return { 'refused', 'unknown' } end
if a.epoch and not is_trainer() then return { 'fenced' } end
if state == a.state then return { 'already', state } end
if not a.allowed[state] then return { 'refused', state } end
redis.call('HSET', JOB, 'state', a.state, 'reason', a.reason)
if a.state == 'running' then redis.call('HSETNX', JOB, 'started_s', a.at_s) end
if ENDED[a.state] then
  redis.call('HSET', JOB, 'ended_s', a.at_s)
  redis.call('SREM', ACTIVE, JOB_ID)
  end_window()
  -- A caller that ends it from outside may do so beside a trainer that lives.
  if not a.epoch then end_epoch() end
end
if not a.epoch then wake_consumers('asked') end
tell(payload())
return { 'set', state }
