-- announce_shard: KEYS[13] shards; ARGV epoch, shard -> {announced} | {fenced}
-- Whoever misses one reads it with the rest of its version, so old ones may go.
if not is_trainer(ARGV[1]) then return { 'fenced' } end
redis.call('XADD', KEYS[13], 'MAXLEN', '~', '100', '*', 'shard', ARGV[2])
return { 'announced' }
