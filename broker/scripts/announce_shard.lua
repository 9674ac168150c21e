-- announce_shard: {epoch}, payload WeightShard -> {announced} | {fenced}
-- A generator that misses one reads it with the rest of its version, so old ones may go.
local SHARDS = job_key('shards')
if not is_trainer() then return { 'fenced' } end
redis.call('XADD', SHARDS, 'MAXLEN', '~', '100', '*', 'shard', payload())
return { 'announced' }
