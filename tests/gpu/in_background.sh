#!/bin/bash
# Runs a command that takes longer than one call to a machine may: in_background.sh FOLDER SECONDS [COMMAND...]
# It starts COMMAND in a session of its own, which outlives this script, and waits SECONDS for its end at most. What it
# prints goes to FOLDER/output. Without COMMAND it only waits. The exit status is that of the command; 75 while it runs.
set -u
if [ $# -lt 2 ]; then
    echo "usage: $0 FOLDER SECONDS [COMMAND...]" >&2
    exit 2
fi
folder=$1 seconds=$2
shift 2
mkdir -p "$folder"
if [ $# -gt 0 ]; then
    rm -f "$folder/status"
    setsid bash -c '"${@:2}" > "$1/output" 2>&1 < /dev/null; echo $? > "$1/status.new"; mv "$1/status.new" "$1/status"' \
        - "$folder" "$@" > /dev/null 2>&1 < /dev/null &
fi
until [ -f "$folder/status" ] || [ "$SECONDS" -ge "$seconds" ]; do
    sleep 1
done
cat "$folder/output"
[ -f "$folder/status" ] || exit 75
exit "$(cat "$folder/status")"
