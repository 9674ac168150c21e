-- claim_rollouts: {epoch, iteration, max_batches, last_entry, read_ahead}
--   last_entry: the newest of its slot that this trainer holds ('0-0': none, it takes over); read_ahead: the entries after it that this
--   trainer has read while it waited: their payloads, megabytes each, come as ''. That of a batch with columns comes as nil: the
--   trainer reads it where they stand
--   -> {claimed, dead count, the kind of engine that sampled them or '', n x (entry, payload, digest, batch id)}
--    | {fenced} | {wrong_iteration, newest iteration}
-- A repeat after a lost answer gives the same again: what is pending after the last entry comes before what is new.
local fence = read_fence()
if not is_its_trainer(fence) then return { 'fenced' } end
if not open_at(fence, a.iteration) then return { 'wrong_iteration', newest_iteration(fence) } end
local slot = slot_of(a.iteration)
local out = { 'claimed', tonumber(redis.call('HGET', PROGRESS, 'dead:' .. slot.index)) or 0, engine_of_job() or '' }
if redis.call('EXISTS', slot.rollouts) == 0 then return out end
local trainer, last, left = whole(a.epoch), a.last_entry, a.max_batches
local function give(entry, batch, digest, id)
  local num = #out
  out[num + 1], out[num + 2], out[num + 3], out[num + 4] = entry, batch, digest, id
  left = left - 1
end
local function add(from)
  if left <= 0 then return end
  local read = redis.call('XREADGROUP', 'GROUP', 'trainers', trainer, 'COUNT', left, 'STREAMS', slot.rollouts, from)
  for _, row in ipairs(read and read[1][2] or {}) do
    if row[2] then
      local entry = entry_of(row)
      give(entry.id, entry.batch or false, entry.digest, entry.batch_id)
    end
  end
end
if last == '0-0' then
  redis.call('XAUTOCLAIM', slot.rollouts, 'trainers', trainer, '0', '0', 'COUNT', '10000', 'JUSTID')
end
-- Where a restart has forgotten that the last entry was given, nothing is passed over: it would never be given again.
local is_given = last == '0-0' or #redis.call('XPENDING', slot.rollouts, 'trainers', last, last, '1') == 1
-- As XREADGROUP would deliver them, without a look at their payloads.
local read = is_given and { unpack(a.read_ahead, 1, math.min(left, #a.read_ahead)) } or {}
if #read > 0 then
  for _, word in ipairs({ 'FORCE', 'JUSTID', 'LASTID', read[#read] }) do read[#read + 1] = word end
  for _, id in ipairs(redis.call('XCLAIM', slot.rollouts, 'trainers', trainer, '0', unpack(read))) do give(id, '', '', '') end
  -- What came meanwhile the next wait brings: here it would be copied twice more.
  if #out > 3 then return out end
end
add(last)
add('>')
return out
