-- write: KEYS[1] any key, ARGV command, its arguments -> the command's answer
return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))
