-- renew_prompts: ARGV generator, n entry ids -> {renewed, lost entry ids ...}
local lost = {}
for i = 2, #ARGV do
  local pending = redis.call('EXISTS', PROMPTS) == 1 and redis.call('XPENDING', PROMPTS, 'generators', ARGV[i], ARGV[i], '1') or {}
  if pending[1] and pending[1][2] == ARGV[1] then
    redis.call('XCLAIM', PROMPTS, 'generators', ARGV[1], '0', ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return { 'renewed', unpack(lost) }
