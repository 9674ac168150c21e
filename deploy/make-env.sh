#!/bin/sh
# Prints .env.example with a random secret wherever it leaves one out:  (umask 077; sh deploy/make-env.sh > .env)
set -eu
while IFS= read -r line; do
  case $line in
    [A-Z]*=) printf '%s%s\n' "$line" "$(head -c 32 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=\n')" ;;
    *) printf '%s\n' "$line" ;;
  esac
done < "$(dirname "$0")/../.env.example"
