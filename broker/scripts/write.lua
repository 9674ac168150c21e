-- write: {command, name}, payloads its arguments; name: of a key of the job, of one of the server's where the call is of no job
--   -> the command's answer, nil where the job was removed: of one nothing comes back
-- One small write that goes on at maxmemory. Its callers may do the same by hand.
if JOB_ID == '' then return redis.call(a.command, 'onbeat:' .. a.name, unpack(ARGUMENTS, 4)) end
if redis.call('HEXISTS', JOB, 'state') == 0 then return false end
return redis.call(a.command, a.name == 'spans' and sealed_key(a.name) or job_key(a.name), unpack(ARGUMENTS, 4))
