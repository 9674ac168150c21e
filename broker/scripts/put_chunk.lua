-- put_chunk: KEYS[13] chunks; ARGV epoch, field, data, milliseconds until all chunks go -> {put} | {fenced}
if not is_trainer(ARGV[1]) then return { 'fenced' } end
redis.call('HSET', KEYS[13], ARGV[2], ARGV[3])
redis.call('PEXPIRE', KEYS[13], ARGV[4])
return { 'put' }
