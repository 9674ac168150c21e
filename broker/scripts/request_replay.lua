-- request_replay: {replay_id, batch_id, recorded_digest, keep_ms, max_kept}
--   -> {asked, the entry packed} | {known, the entry packed} | {full, how many wait} | {unknown}
-- A batch that waits already, or is being sampled, is not asked for twice. What is over keep_ms old goes, and so does the
-- oldest one that is over where max_kept of them are there.
if redis.call('HEXISTS', JOB, 'state') == 0 then return { 'unknown' } end
local now, oldest, kept, waiting, gone = now_ms(), nil, 0, 0, {}
local all = redis.call('HGETALL', REPLAYS)
for i = 1, #all, 2 do
  local one = replay_of(all[i], all[i + 1])
  if not one or now - one.asked_ms > a.keep_ms then
    gone[#gone + 1] = all[i]
  else
    kept = kept + 1
    local is_over = one.state == 'done' or one.state == 'failed' or one.ends_ms < now
    if not is_over then
      waiting = waiting + 1
      if one.job_id == JOB_ID and one.batch_id == a.batch_id then return { 'known', all[i + 1] } end
    elseif not oldest or one.asked_ms < oldest.asked_ms then
      oldest = { id = all[i], asked_ms = one.asked_ms }
    end
  end
end
if kept >= a.max_kept then
  if not oldest then return { 'full', waiting } end
  gone[#gone + 1] = oldest.id
end
if #gone > 0 then redis.call('HDEL', REPLAYS, unpack(gone)) end
local entry = cmsgpack.pack({ replay_id = a.replay_id, job_id = JOB_ID, batch_id = a.batch_id, state = 'queued',
  recorded_digest = a.recorded_digest, digest = '', generator = '', reason = '', attempt = 0, lease_ms = 0,
  asked_ms = now, ends_ms = now + a.keep_ms })
redis.call('HSET', REPLAYS, a.replay_id, entry)
redis.call('PEXPIRE', REPLAYS, a.keep_ms)
return { 'asked', entry }
