-- set_state: ARGV new state, reason, event, unix time, trainer epoch or '', n allowed states before
--   -> {set} | {already} | {refused, state} | {fenced}
-- An epoch comes from a trainer: one that was replaced, or slept through a resume, ends nobody else's run (I4).
local state = redis.call('HGET', JOB, 'state')
if not state then return { 'refused', 'unknown' } end
if ARGV[5] ~= '' and not is_trainer(ARGV[5]) then return { 'fenced' } end
if state == ARGV[1] then return { 'already', state } end
local allowed = false
for i = 6, #ARGV do allowed = allowed or ARGV[i] == state end
if not allowed then return { 'refused', state } end
redis.call('HSET', JOB, 'state', ARGV[1], 'reason', ARGV[2])
if ARGV[1] == 'running' then
  redis.call('HSETNX', JOB, 'started_s', ARGV[4])
elseif ARGV[1] ~= 'cancelling' then
  redis.call('HSET', JOB, 'ended_s', ARGV[4])
end
tell(ARGV[3])
return { 'set', state }
