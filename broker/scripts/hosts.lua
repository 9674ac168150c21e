-- hosts: {call, host, ranks, formed, sealed, about}: what a host does for the trainer that several hosts make up, by `call`:
--   form    about {least, most, lease_ms, kind, address, key}: begins a generation, which it leads -> formed | stands
--   look    about {waits} -> none | forming | late: it is sealed; waits: this host is noted as one that would come
--   join    about {kind, reaches: the leader}: offers its ranks -> joined | none | late | full | other_code | other_torch |
--           other_device | other_cpu | unreachable
--   seal    the leader: no other host comes, and all may start -> sealed | few | gone
--   renew   sealed: under which its ranks run, or 0 -> forming | sealed | gone
--   leave   about {reason}: ends the generation that it is a member of -> left
--   formed: the number of the generation that it is a member of, or 0; kind: {code, torch, device, cpu}, alike on all hosts
--   -> {outcome, the hosts as the prelude has them, packed} | {unknown}: no such job
-- A number is handed out at each forming and each sealing, by the server's clock as well: a restart that has lost one hands
-- it out to no other.
local MAX_REFUSED, KINDS_ALIKE = 32, { 'code', 'torch', 'device', 'cpu' }
if redis.call('EXISTS', JOB) == 0 then return { 'unknown' } end
local hosts, now = standing_hosts(), now_ms()
local member
for _, one in ipairs(hosts.members) do
  if one.host == a.host then member = one end
end
local is_its_own = hosts.formed ~= 0 and hosts.formed == a.formed
local function answered(outcome)
  return { outcome, cmsgpack.pack(hosts) }
end
local function next_number()
  hosts.number = math.max(hosts.number + 1, now)
  return hosts.number
end
local function stay(one)
  one.until_ms = now + hosts.lease_ms
  write_hosts(hosts)
end
local function refuse(why)
  for i, one in ipairs(hosts.refused) do
    if one.host == a.host then table.remove(hosts.refused, i) end
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
    local is_heard = hosts.sealed == 0 and hosts.members[1].host == a.host
    return answered(is_heard and 'formed' or 'stands')
  end
  local number, reason = next_number(), hosts.reason
  hosts = a.about
  hosts.number, hosts.formed, hosts.sealed, hosts.members, hosts.refused, hosts.reason = number, number, 0, {}, {}, reason
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
