#!/bin/sh
# Makes the users from the passwords in the environment, or in the files of secrets, starts the server, and gives it its
# library of functions: no role may bring its own. The seal, a secret in the names of keys, belongs to the data and lies
# beside them. Nothing secret stands on a command line, or in the server's environment.
set -eu
umask 077
here=/usr/share/onbeat

hash_of() {
  printf %s "$1" | sha256sum | cut -c 1-64
}

passwords="REDIS_PASSWORD REDIS_GATEWAY_PASSWORD REDIS_TRAINER_PASSWORD REDIS_GENERATOR_PASSWORD REDIS_STAGE_PASSWORD"
passwords="$passwords REDIS_TASKS_PASSWORD REDIS_CELERY_PASSWORD REDIS_FLOWER_PASSWORD"
cure="make .env with deploy/make-env.sh, or give an old one what it lacks: sh deploy/make-env.sh .env >> .env"
for name in $passwords; do
  eval "value=\${$name:-}"
  if [ -z "$value" ]; then value=$(tr -d '[:cntrl:]' 2>/dev/null < "/run/secrets/$name" || true); fi
  if [ -z "$value" ]; then echo "$name is neither set nor a file that can be read: $cure" >&2; exit 2; fi
  eval "$name=\$value"
done

# Workers of tasks make backups: their group may read the data, other users may not (docs/operate.md, Backup).
readable() {
  chmod -R g+rX,o-rwx /data/appendonlydir /data/seal 2>/dev/null || true
}

test -s /data/seal || head -c 16 /dev/urandom | sha256sum | cut -c 1-32 > /data/seal
seal=$(cat /data/seal)

sed -e "s/@SEAL@/$seal/g" \
    -e "s/@DEFAULT@/$(hash_of "$REDIS_PASSWORD")/" \
    -e "s/@GATEWAY@/$(hash_of "$REDIS_GATEWAY_PASSWORD")/" \
    -e "s/@TRAINER@/$(hash_of "$REDIS_TRAINER_PASSWORD")/" \
    -e "s/@GENERATOR@/$(hash_of "$REDIS_GENERATOR_PASSWORD")/" \
    -e "s/@STAGE@/$(hash_of "$REDIS_STAGE_PASSWORD")/" \
    -e "s/@TASKS@/$(hash_of "$REDIS_TASKS_PASSWORD")/" \
    -e "s/@CELERY@/$(hash_of "$REDIS_CELERY_PASSWORD")/" \
    -e "s/@FLOWER@/$(hash_of "$REDIS_FLOWER_PASSWORD")/" \
    -e "s/@LOADER@/$(head -c 32 /dev/urandom | sha256sum | cut -c 1-64)/" \
    "$here/users.acl" > /tmp/users.acl

sed -e "s/@SEAL@/$seal/" "$here/library.lua" > /tmp/library.lua

load_library() {
  export REDISCLI_AUTH="$REDIS_PASSWORD"
  until [ "$(redis-cli ping 2>/dev/null)" = PONG ]; do sleep 0.1; done
  redis-cli -x function load replace < /tmp/library.lua > /dev/null
}

load_library &
unset $passwords
readable
umask 027
exec redis-server "$here/redis.conf" --maxmemory "${REDIS_MAXMEMORY:-1gb}"
