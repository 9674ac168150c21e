#!/bin/sh
# Prometheus reads the key of its scrapes from a file. A secret of docker compose that comes from the environment can't
# enter a container whose root is read-only; so the key comes as a variable, and is written to /tmp, which is memory.
set -eu
umask 077
printf '%s' "$ONBEAT_METRICS_KEY" > /tmp/metrics_key
unset ONBEAT_METRICS_KEY
exec prometheus --config.file=/etc/prometheus/prometheus.yml "$@"
