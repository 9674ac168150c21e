#!/bin/sh
# Makes the users from the passwords in the environment, starts the server, and gives it its scripts: it forgets them
# whenever it ends, and no role may bring its own. Nothing secret stands on a command line.
set -eu
umask 077
here=/usr/share/onbeat

hash_of() {
  printf %s "$1" | sha256sum | cut -c 1-64
}

sed -e "s/@DEFAULT@/$(hash_of "${REDIS_PASSWORD:?}")/" \
    -e "s/@GATEWAY@/$(hash_of "${REDIS_GATEWAY_PASSWORD:?}")/" \
    -e "s/@TRAINER@/$(hash_of "${REDIS_TRAINER_PASSWORD:?}")/" \
    -e "s/@GENERATOR@/$(hash_of "${REDIS_GENERATOR_PASSWORD:?}")/" \
    -e "s/@STAGE@/$(hash_of "${REDIS_STAGE_PASSWORD:?}")/" \
    -e "s/@CELERY@/$(hash_of "${REDIS_CELERY_PASSWORD:?}")/" \
    -e "s/@LOADER@/$(head -c 32 /dev/urandom | sha256sum | cut -c 1-64)/" \
    "$here/users.acl" > /tmp/users.acl

load_scripts() {
  export REDISCLI_AUTH="$REDIS_PASSWORD"
  until [ "$(redis-cli ping 2>/dev/null)" = PONG ]; do sleep 0.1; done
  for script in "$here"/scripts/*.lua; do
    redis-cli -x script load < "$script" > /dev/null
  done
}

load_scripts &
exec redis-server "$here/redis.conf" --maxmemory "${REDIS_MAXMEMORY:-1gb}"
