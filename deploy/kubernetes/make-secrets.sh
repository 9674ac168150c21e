#!/bin/sh
# Prints the Secrets of a new stack:  sh deploy/kubernetes/make-secrets.sh | kubectl apply -n onbeat -f -
# Once: another run makes other passwords. For a Redis of your own, after `set -a; . DIR/redis.env; set +a`
# (deploy/own-redis.sh), its addresses take the place of those of the server in redis/.
set -eu

secret() { head -c 32 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=\n'; }
gateway=$(secret) trainer=$(secret) generator=$(secret) stage=$(secret)
tasks=$(secret) celery=$(secret) flower=$(secret)

cat << EOF
apiVersion: v1
kind: Secret
metadata:
  name: onbeat-secrets
stringData:
  api-key: "$(secret)"
  reward-key: "$(secret)"
  metrics-key: "$(secret)"
  redis-gateway: "${GATEWAY:-redis://gateway:$gateway@redis:6379/0}"
  redis-trainer: "${TRAINER:-redis://trainer:$trainer@redis:6379/0}"
  redis-generator: "${GENERATOR:-redis://generator:$generator@redis:6379/0}"
  redis-stage: "${STAGE:-redis://stage:$stage@redis:6379/0}"
  redis-tasks: "${TASKS:-redis://tasks:$tasks@redis:6379/0}"
  redis-celery: "${CELERY:-redis://celery:$celery@redis:6379/0}"
EOF
# Keys with scopes, by their hashes (docs/http.md, Keys): none yet.
cat << EOF
---
apiVersion: v1
kind: Secret
metadata:
  name: onbeat-keys
stringData:
  keys: ""
EOF
test -z "${GATEWAY:-}" || exit 0
cat << EOF
---
apiVersion: v1
kind: Secret
metadata:
  name: onbeat-redis
stringData:
  password: "$(secret)"
  gateway: "$gateway"
  trainer: "$trainer"
  generator: "$generator"
  stage: "$stage"
  tasks: "$tasks"
  celery: "$celery"
  flower: "$flower"
EOF
