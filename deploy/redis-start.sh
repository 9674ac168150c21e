#!/bin/sh
# Makes the users from the passwords in the environment, starts the server, and gives it its library of functions: no role
# may bring its own. The seal, a secret in the names of keys, belongs to the data and lies beside them. Nothing secret stands
# on a command line.
set -eu
umask 077
here=/usr/share/onbeat

hash_of() {
  printf %s "$1" | sha256sum | cut -c 1-64
}

test -s /data/seal || head -c 16 /dev/urandom | sha256sum | cut -c 1-32 > /data/seal
seal=$(cat /data/seal)

sed -e "s/@SEAL@/$seal/g" \
    -e "s/@DEFAULT@/$(hash_of "${REDIS_PASSWORD:?}")/" \
    -e "s/@GATEWAY@/$(hash_of "${REDIS_GATEWAY_PASSWORD:?}")/" \
    -e "s/@TRAINER@/$(hash_of "${REDIS_TRAINER_PASSWORD:?}")/" \
    -e "s/@GENERATOR@/$(hash_of "${REDIS_GENERATOR_PASSWORD:?}")/" \
    -e "s/@STAGE@/$(hash_of "${REDIS_STAGE_PASSWORD:?}")/" \
    -e "s/@LOADER@/$(head -c 32 /dev/urandom | sha256sum | cut -c 1-64)/" \
    "$here/users.acl" > /tmp/users.acl

sed -e "s/@SEAL@/$seal/" "$here/library.lua" > /tmp/library.lua

load_library() {
  export REDISCLI_AUTH="$REDIS_PASSWORD"
  until [ "$(redis-cli ping 2>/dev/null)" = PONG ]; do sleep 0.1; done
  redis-cli -x function load replace < /tmp/library.lua > /dev/null
}

load_library &
exec redis-server "$here/redis.conf" --maxmemory "${REDIS_MAXMEMORY:-1gb}"
