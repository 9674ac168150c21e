-- present: {kind} -> {present, n x (id, what it said of itself)}; kind: of presence_key
local out = { 'present' }
for _, word in ipairs(redis.call('HGETALL', presence_key(a.kind))) do out[#out + 1] = word end
return out
