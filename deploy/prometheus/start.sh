#!/bin/sh
# Prometheus reads the key of its scrapes from a file. A secret of docker compose that comes from the environment can't
# enter a container whose root is read-only; so the key comes as a variable, and is written to /tmp, which is memory. The
# rules get the address of the runbooks there, too (ALERT_RUNBOOKS, a page made of docs/alerts.md).
set -eu
umask 077
printf '%s' "$ONBEAT_METRICS_KEY" > /tmp/metrics_key
unset ONBEAT_METRICS_KEY
runbooks=$(printf %s "${ALERT_RUNBOOKS:-docs/alerts.md}" | sed 's/[&|\\]/\\&/g')
cp /etc/prometheus/prometheus.yml /tmp/prometheus.yml
sed "s|runbook_url: docs/alerts.md#|runbook_url: $runbooks#|" /etc/prometheus/alerts.yml > /tmp/alerts.yml
exec prometheus --config.file=/tmp/prometheus.yml "$@"
