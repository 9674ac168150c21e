-- create_job: ARGV spec, event, n x (field, value) -> {created} | {already}
-- The spec's key is KEYS[12]: a repeat after a lost answer changes nothing.
if redis.call('EXISTS', JOB) == 1 then return { 'already' } end
redis.call('SET', KEYS[12], ARGV[1])
redis.call('HSET', JOB, unpack(ARGV, 3))
tell(ARGV[2])
return { 'created' }
