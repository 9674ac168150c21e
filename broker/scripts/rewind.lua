-- rewind: {epoch, iteration, digest, previous}, payloads AuditRecord, JobEvent; iteration: the next to open; digest,
--   previous: of the record, and of the one that it follows
--   -> {rewound} | {already_rewound} | {fenced} | {out_of_order, committed} | {broken_link}
-- The trainer resumes from a checkpoint that is older than the fence: what came after is done again under this epoch,
-- and the versions that it made are announced no more.
local fence = read_fence()
if not is_its_trainer(fence) then return { 'fenced' } end
local before, last = a.iteration - 1, last_link()
local is_repeated = last == a.digest and #fence.window == 0 and fence.committed == before
if is_repeated then return { 'already_rewound' } end
if before > fence.committed then return { 'out_of_order', fence.committed } end
if a.previous ~= last then return { 'broken_link' } end
close_window(before)
-- Newer versions are made again, maybe with other weights: until then no generator may read them ahead.
for _, version in ipairs(redis.call('HKEYS', WEIGHTS)) do
  if tonumber(version) > a.iteration then redis.call('HDEL', WEIGHTS, version) end
end
redis.call('XADD', AUDIT, '*', 'record', payload(), 'digest', a.digest)
tell(payload())
count('rewinds')
return { 'rewound' }
