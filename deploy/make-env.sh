#!/bin/sh
# Prints .env.example with a random secret wherever it leaves one out:  (umask 077; sh deploy/make-env.sh > .env)
# With an old .env, what that lacks:  sh deploy/make-env.sh .env >> .env
set -eu
old=${1:-/dev/null}
# What is appended begins a line of its own.
if [ -s "$old" ] && [ -n "$(tail -c 1 "$old")" ]; then echo; fi
while IFS= read -r line; do
  name=${line%%=*}
  case $line in
    [A-Z]*=*) if grep -qE "^${name}(_FILE)?=" "$old"; then continue; fi ;;
    *) if [ "$old" != /dev/null ]; then continue; fi ;;
  esac
  case $line in
    [A-Z]*=) printf '%s%s\n' "$line" "$(head -c 32 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=\n')" ;;
    *) printf '%s\n' "$line" ;;
  esac
done < "$(dirname "$0")/../.env.example"
