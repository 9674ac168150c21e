-- restore_chain: {epoch, committed, digests, previous}, payloads AuditRecord for each of digests, oldest first; committed:
--   the last iteration that stands after them; previous: of the record that the first of them follows
--   -> {restored} | {already_restored} | {fenced} | {broken_link}
-- A server that came back older gets records back that it had accepted before: the run folder has them, and the weights that
-- they made. The fence goes on behind them, with nothing open.
local fence = read_fence()
if not is_its_trainer(fence) then return { 'fenced' } end
local last = last_link()
local is_repeated = last == a.digests[#a.digests] and #fence.window == 0 and fence.committed == a.committed
if is_repeated then return { 'already_restored' } end
if a.previous ~= last then return { 'broken_link' } end
close_window(a.committed)
for _, digest in ipairs(a.digests) do
  redis.call('XADD', AUDIT, '*', 'record', payload(), 'digest', digest)
end
return { 'restored' }
