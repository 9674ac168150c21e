-- put_chunk: {epoch, field, keep_ms}, payload its bytes -> {put} | {fenced} | OOM, at maxmemory; keep_ms: until all chunks go
-- Where an open iteration has published batches its commit frees them, and the chunk is of the version that it needs: it goes past
-- the limit. A version that nothing waits for doesn't.
local CHUNKS = job_key('chunks')
local fence = read_fence()
if not is_its_trainer(fence) then return { 'fenced' } end
local used, limit = memory()
local frees = false
for _, open in ipairs(fence.window) do frees = frees or progress(slot_of(open.iteration)).published > 0 end
if limit > 0 and used >= limit and not frees then return redis.error_reply(OUT_OF_MEMORY) end
redis.call('HSET', CHUNKS, a.field, payload())
redis.call('PEXPIRE', CHUNKS, whole(a.keep_ms))
return { 'put' }
