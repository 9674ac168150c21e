-- set_state: KEYS[13] active; ARGV job id, new state, reason, event, unix time, trainer epoch or '', n allowed states before
--   -> {set} | {already} | {refused, state} | {fenced}
-- An epoch comes from a trainer: one that was replaced, or slept through a resume, ends nobody else's run (I4).
local state = redis.call('HGET', JOB, 'state')
if not state then return { 'refused', 'unknown' } end
if ARGV[6] ~= '' and not is_trainer(ARGV[6]) then return { 'fenced' } end
if state == ARGV[2] then return { 'already', state } end
local allowed = false
for i = 7, #ARGV do allowed = allowed or ARGV[i] == state end
if not allowed then return { 'refused', state } end
redis.call('HSET', JOB, 'state', ARGV[2], 'reason', ARGV[3])
if ARGV[2] == 'running' then redis.call('HSETNX', JOB, 'started_s', ARGV[5]) end
if ENDED[ARGV[2]] then
  redis.call('HSET', JOB, 'ended_s', ARGV[5])
  redis.call('SREM', KEYS[13], ARGV[1])
  close_iteration()
  -- Whoever ends it from outside may do so beside a trainer that lives.
  if ARGV[6] == '' then end_epoch() end
end
tell(ARGV[4])
return { 'set', state }
