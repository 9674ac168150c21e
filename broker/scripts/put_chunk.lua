-- put_chunk: {epoch, field, keep_ms}, payload its bytes -> {put} | {fenced} | OOM, at maxmemory; keep_ms: until all chunks go
-- Where an open iteration has published batches its commit frees them, and the chunk is of the version that it needs: it goes past
-- the limit. A version that nothing waits for doesn't.
local CHUNKS = job_key('chunks')
local fence = read_fence()
if not is_its_trainer(fence) then return { 'fenced' } end
require_room(fence.window, 1)
redis.call('HSET', CHUNKS, a.field, payload())
redis.call('PEXPIRE', CHUNKS, whole(a.keep_ms))
return { 'put' }
