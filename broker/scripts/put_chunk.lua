-- put_chunk: KEYS[9] chunks; {epoch, field, keep_ms}, payload its bytes -> {put} | {fenced}; keep_ms: until all chunks go
local CHUNKS = KEYS[9]
if not is_trainer() then return { 'fenced' } end
redis.call('HSET', CHUNKS, a.field, payload())
redis.call('PEXPIRE', CHUNKS, whole(a.keep_ms))
return { 'put' }
