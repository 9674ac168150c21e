#!/bin/sh
# Alertmanager reads no variable in its configuration: the addresses, which may hold secrets, are put into a copy in /tmp,
# which is memory. Without one alerts stand on its own page alone.
set -eu
umask 077
sh /etc/alertmanager/configure.sh > /tmp/alertmanager.yml
unset ALERT_WEBHOOK ALERT_WEBHOOK_WARNING ALERT_ROUTES
exec alertmanager --config.file=/tmp/alertmanager.yml "$@"
