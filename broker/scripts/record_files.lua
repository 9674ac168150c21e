-- record_files: {epoch}, payload: which objects are the files of the run -> {recorded} | {fenced}
if not is_trainer() then return { 'fenced' } end
redis.call('SET', job_key('files'), payload())
return { 'recorded' }
