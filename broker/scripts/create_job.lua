-- create_job: KEYS[13] spec, [14] jobs, [15] active; ARGV job id, unix time, spec, event, n x (field, value)
--   -> {created} | {already}
-- A repeat after a lost answer changes nothing.
if redis.call('EXISTS', JOB) == 1 then return { 'already' } end
redis.call('SET', KEYS[13], ARGV[3])
redis.call('HSET', JOB, unpack(ARGV, 5))
redis.call('ZADD', KEYS[14], ARGV[2], ARGV[1])
redis.call('SADD', KEYS[15], ARGV[1])
tell(ARGV[4])
return { 'created' }
