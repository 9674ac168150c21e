#!/bin/sh
# Alertmanager reads no variable in its configuration: the webhook's address, which may hold a secret, is put into a copy
# in /tmp, which is memory. Without one alerts stand on its own page alone.
set -eu
umask 077
webhook=${ALERT_WEBHOOK:-}
unset ALERT_WEBHOOK
sed "s|@WEBHOOK@|$(printf %s "${webhook:-http://127.0.0.1:9/}" | sed 's/[&|\\]/\\&/g')|" /etc/alertmanager/alertmanager.yml > /tmp/alertmanager.yml
exec alertmanager --config.file=/tmp/alertmanager.yml "$@"
