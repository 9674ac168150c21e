-- report_spans: {max_reports}, payload TimelineSpans -> {reported} | {refused}: too large, or of a job that was removed
local spans = payload()
if #spans > 65536 or redis.call('HEXISTS', JOB, 'state') == 0 then return { 'refused' } end
redis.call('XADD', sealed_key('spans'), 'MAXLEN', whole(math.min(a.max_reports, 256)), '*', 'spans', spans)
return { 'reported' }
