#!/bin/sh
# Prints Alertmanager's configuration, by these variables (docs/monitoring.md, Who is told):
#   ALERT_WEBHOOK           where alerts go
#   ALERT_WEBHOOK_WARNING   where warnings go; without it, to ALERT_WEBHOOK
#   ALERT_ROUTES            where warnings of some jobs go: tag:TAG=ADDRESS or owner:KEY=ADDRESS, with spaces between
#   ALERT_QUIET             hours without warnings, as 22:00-07:00; without it, none
#   ALERT_QUIET_ZONE        the time zone of these hours, as Europe/Berlin; UTC without it
# ALERT_WEBHOOK=https://hooks.example/onbeat sh deploy/alertmanager/configure.sh > alertmanager.yaml
set -euf

refuse() {
  echo "configure.sh: $1" >&2
  exit 2
}

# Text for the right-hand side of sed's `s|||`.
escaped() { printf %s "$1" | sed 's/[&|\\]/\\&/g'; }

# Refuses what is no address, or would end the quotes around it. $1: its variable, $2: its value.
require_address() {
  case $2 in
    *[\"\\\ ]*) refuse "$1 has a quote, a backslash or a space: $2" ;;
    http://?* | https://?*) ;;
    *) refuse "$1 is no address: $2 (write https://HOST/PATH)" ;;
  esac
}

# Without an address alerts stand on Alertmanager's own page alone: nothing listens at port 9.
webhook=${ALERT_WEBHOOK:-http://127.0.0.1:9/}
warning=${ALERT_WEBHOOK_WARNING:-$webhook}
require_address ALERT_WEBHOOK "$webhook"
require_address ALERT_WEBHOOK_WARNING "$warning"

routes='' receivers='' number=0
for entry in ${ALERT_ROUTES:-}; do
  whose=${entry%%=*} address=${entry#*=}
  name=${whose#*:}
  case $name in
    '' | *[!A-Za-z0-9_.-]*) refuse "ALERT_ROUTES: $entry (write tag:TAG=ADDRESS or owner:KEY=ADDRESS; of letters, digits, ., _ and -)" ;;
  esac
  # Tags stand between commas, whatever their number: ",a,b,". In brackets a dot is a dot.
  case $whose in
    tag:*) matcher="tags=~\".*,$(printf %s "$name" | sed 's/[.]/[.]/g'),.*\"" ;;
    owner:*) matcher="owner=\"$name\"" ;;
    *) refuse "ALERT_ROUTES: $entry (write tag:TAG=ADDRESS or owner:KEY=ADDRESS)" ;;
  esac
  require_address ALERT_ROUTES "$address"
  number=$((number + 1))
  # A route doesn't take the quiet hours over from the one above it.
  routes="$routes{matchers: ['$matcher'], receiver: route-$number, mute_time_intervals: [quiet]}, "
  receivers="$receivers  - {name: route-$number, webhook_configs: [{url: \"$address\", send_resolved: true}]}
"
done

quiet=''
if [ -n "${ALERT_QUIET:-}" ]; then
  zone=${ALERT_QUIET_ZONE:-UTC}
  case $zone in *[!A-Za-z0-9_/+-]*) refuse "ALERT_QUIET_ZONE is no time zone: $zone (write Europe/Berlin)" ;; esac
  case $ALERT_QUIET in
    [0-2][0-9]:[0-5][0-9]-[0-2][0-9]:[0-5][0-9]) ;;
    *) refuse "ALERT_QUIET is no range of hours: $ALERT_QUIET (write 22:00-07:00)" ;;
  esac
  begin=${ALERT_QUIET%-*} end=${ALERT_QUIET#*-}
  begin_number=$(printf %s "$begin" | tr -d :) end_number=$(printf %s "$end" | tr -d :)
  if [ "$begin_number" -gt 2359 ] || [ "$end_number" -gt 2400 ] || [ "$begin_number" -eq "$end_number" ]; then
    refuse "ALERT_QUIET is no range of hours: $ALERT_QUIET (write 22:00-07:00)"
  fi
  # A range of Alertmanager's ends on the day on which it begins.
  if [ "$begin_number" -lt "$end_number" ]; then
    times="{start_time: \"$begin\", end_time: \"$end\"}"
  else
    times="{start_time: \"$begin\", end_time: \"24:00\"}"
    [ "$end_number" -eq 0 ] || times="$times, {start_time: \"00:00\", end_time: \"$end\"}"
  fi
  quiet="{times: [$times], location: \"$zone\"}"
fi

while IFS= read -r line; do
  case $line in
    *"# @RECEIVERS@") printf %s "$receivers" ;;
    *) printf '%s\n' "$line" ;;
  esac
done < "$(dirname "$0")/alertmanager.yml" | sed \
  -e "s|@WEBHOOK@|$(escaped "$webhook")|" -e "s|@WEBHOOK_WARNING@|$(escaped "$warning")|" \
  -e "s|@ROUTES@|$(escaped "${routes%, }")|" -e "s|@QUIET@|$(escaped "$quiet")|"
