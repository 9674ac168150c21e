#!/bin/sh
# Users and library for a Redis of your own, into a new folder:  sh deploy/own-redis.sh DIR redis.example:6380 [rediss]
#   users.acl     its `aclfile`, with passwords as hashes
#   library.lua   redis-cli -x FUNCTION LOAD REPLACE < library.lua, once; the server keeps it
#   redis.env     an address for each role: give a process its own as ONBEAT_REDIS_URL, and no other
# docs/redis.md, A server of your own.
set -eu
umask 077
folder=$1 server=$2 scheme=${3:-redis}
mkdir "$folder"
"${PYTHON:-python}" -m broker.connection.script_texts "$folder"

secret() { head -c 24 /dev/urandom | base64 | tr '+/' '-_'; }
seal=$(head -c 16 /dev/urandom | sha256sum | cut -c 1-32)
sed -i "s/@SEAL@/$seal/g" "$folder/users.acl" "$folder/library.lua"
for role in DEFAULT GATEWAY TRAINER GENERATOR STAGE TASKS CELERY FLOWER LOADER; do
  password=$(secret)
  hash=$(printf %s "$password" | sha256sum | cut -c 1-64)
  sed -i "s/@$role@/$hash/" "$folder/users.acl"
  user=$(printf %s "$role" | tr '[:upper:]' '[:lower:]')
  printf '%s=%s://%s:%s@%s/0\n' "$role" "$scheme" "$user" "$password" "$server" >> "$folder/redis.env"
done
