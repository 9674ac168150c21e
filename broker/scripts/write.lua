-- write: KEYS[1] any key, [2] the job's hash where it is a key of a job; {command}, payloads its arguments
--   -> the command's answer, nil where the job was removed: of one nothing comes back
local KEY, OF_JOB = unpack(KEYS)
if OF_JOB and redis.call('HEXISTS', OF_JOB, 'state') == 0 then return false end
return redis.call(a.command, KEY, unpack(ARGV, 2))
