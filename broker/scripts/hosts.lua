-- hosts: {call, host, ranks, formed, sealed, about}
-- Moves the hosts whose ranks together are one trainer.
--   call     Which of the calls below it is.
--   host     The id of the consumer that calls.
--   ranks    How many ranks it offers.
--   formed   The number of the generation that it is a member of, or 0.
--   sealed   In `renew`: the number under which its ranks run, or 0.
--   about    The arguments of the call.
--   -> {outcome, the hosts as the prelude has them, packed}
--    | {unknown}   no such job
-- The calls, each with what `about` holds:
--   form    {least, most, lease_ms, kind, address, key}: begins a generation, which it leads
--           -> formed | stands
--   look    {waits}: looks at the generation; waits: this host is noted as one that would come
--           -> none | forming | late: it is sealed
--   join    {kind, reaches}: offers its ranks; reaches: it reaches the leader
--           -> joined | none | late | full | other_code | other_torch | other_device | other_cpu | unreachable
--   seal    no other host comes, and all may start; the leader calls it
--           -> sealed | few | gone
--   renew   begins its lease anew
--           -> forming | sealed | gone
--   leave   {reason}: ends the generation that it is a member of
--           -> left
-- A kind is {code, torch, device, cpu}, alike on all hosts of a trainer (I7).
-- A number is handed out at each forming and each sealing, by the server's clock as well: a restart that has lost one
-- hands it out to no other.
-- Keys:
--   job     read: whether the job exists
--   hosts   read and written: the group, its members and the ends of their leases
--   fence   written: epoch, owner, lease_until; the end of a sealed group fences its trainer off
local MAX_REFUSED = 32
local KINDS_ALIKE = { 'code', 'torch', 'device', 'cpu' }
if redis.call('EXISTS', JOB) == 0 then return { 'unknown' } end
local hosts = standing_hosts()
local now = now_ms()
local member
for _, other in ipairs(hosts.members) do
  if other.host == a.host then member = other end
end
local is_its_own = hosts.formed ~= 0 and hosts.formed == a.formed
local function answered(outcome)
  return { outcome, cmsgpack.pack(hosts) }
end
local function next_number()
  -- Above the last number and not below the clock in ms: a restart that has lost a number gives it out to no other.
  hosts.number = math.max(hosts.number + 1, now)
  return hosts.number
end
local function stay(host)
  -- The end of the member's lease, in ms of Unix time by the server's clock.
  host.until_ms = now + hosts.lease_ms
  write_hosts(hosts)
end
local function refuse(why)
  for i, refusal in ipairs(hosts.refused) do
    if refusal.host == a.host then table.remove(hosts.refused, i) end
  end
  hosts.refused[#hosts.refused + 1] = { host = a.host, why = why, at_ms = now }
  if #hosts.refused > MAX_REFUSED then table.remove(hosts.refused, 1) end
  write_hosts(hosts)
  return answered(why)
end
local function enter()
  member = { host = a.host, ranks = a.ranks, joined_ms = now }
  hosts.members[#hosts.members + 1] = member
  stay(member)
end

local calls = {}
function calls.form()
  if hosts.formed ~= 0 then
    -- The leader whose answer was lost forms again: the same generation is its answer. The first member leads.
    local is_heard = hosts.sealed == 0 and hosts.members[1].host == a.host
    return answered(is_heard and 'formed' or 'stands')
  end
  local number = next_number()
  local reason = hosts.reason
  hosts = a.about
  hosts.number = number
  hosts.formed = number
  hosts.sealed = 0
  hosts.members = {}
  hosts.refused = {}
  hosts.reason = reason
  enter()
  return answered('formed')
end
function calls.look()
  if hosts.sealed ~= 0 then return a.about.waits and refuse('late') or answered('late') end
  return answered(hosts.formed ~= 0 and 'forming' or 'none')
end
function calls.join()
  if hosts.formed == 0 then return answered('none') end
  if member and hosts.sealed == 0 then return answered('joined') end
  if hosts.sealed ~= 0 then return refuse('late') end
  if #hosts.members >= hosts.most then return refuse('full') end
  for _, name in ipairs(KINDS_ALIKE) do
    if a.about.kind[name] ~= hosts.kind[name] then return refuse('other_' .. name) end
  end
  if not a.about.reaches then return refuse('unreachable') end
  enter()
  return answered('joined')
end
function calls.seal()
  if not is_its_own then return answered('gone') end
  if hosts.sealed == 0 then
    -- Hosts are counted here, not ranks.
    if #hosts.members < hosts.least then return answered('few') end
    hosts.sealed = next_number()
    write_hosts(hosts)
  end
  return answered('sealed')
end
function calls.renew()
  if not member or not is_its_own or (a.sealed ~= 0 and a.sealed ~= hosts.sealed) then return answered('gone') end
  stay(member)
  return answered(hosts.sealed ~= 0 and 'sealed' or 'forming')
end
function calls.leave()
  if member and is_its_own then hosts = end_hosts(hosts, a.about.reason) end
  return answered('left')
end
return calls[a.call]()
