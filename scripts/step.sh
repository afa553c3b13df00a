#!/usr/bin/env bash
# Runs a command and shows that it is alive; its output appears only if it fails.
#
#   scripts/step.sh MESSAGE COMMAND [ARG…]
#
# On a terminal: one line with the seconds and the command's last line of output. Elsewhere: a line every 15 seconds.
# Ctrl-C ends the command and everything that it started.
set -uo pipefail

message=$1
shift
log=$(mktemp "${TMPDIR:-/tmp}/triptych-step.XXXXXX")
started=$SECONDS

last_line() {
    # ASCII only: the tail may begin inside a character, and progress bars are no use here.
    tail -c 2000 "$log" | tr '\r' '\n' | LC_ALL=C sed 's/\x1b\[[0-9;?]*[a-zA-Z]//g' | LC_ALL=C tr -cd '\n\040-\176' |
        sed 's/^ *//; s/ *$//' | grep -v '^$' | tail -n 1
}

end() {
    # Not $command: the signal may come before that is set.
    for job in $(jobs -p); do kill -- "-$job" 2>/dev/null; done
    wait
    rm -f "$log"
    [[ -t 1 ]] && printf '\r\033[K'
    echo "$message: interrupted after $((SECONDS - started)) s"
    exit "$1"
}

trap 'end 130' INT
trap 'end 143' TERM
# Job control for this one moment: the command gets a process group, which can be ended as a whole.
set -m
"$@" >"$log" 2>&1 </dev/null &
command=$!
set +m

# Silent for the first moments, so that a step that has nothing to do says so in one line.
shown=0
while kill -0 "$command" 2>/dev/null; do
    if ((SECONDS - started < 2)); then sleep 0.2; else sleep 1; fi
    elapsed=$((SECONDS - started))
    if [[ -t 1 ]]; then
        columns=$(tput cols 2>/dev/null || echo 80)
        line="$message … $elapsed s  $(last_line)"
        printf '\r\033[K%s' "${line:0:columns-1}"
    elif ((elapsed >= shown && elapsed > 0)); then
        line=$(last_line)
        echo "$message … $elapsed s${line:+  ${line:0:100}}"
        shown=$((elapsed + 15))
    fi
done
wait "$command"
status=$?

[[ -t 1 ]] && printf '\r\033[K'
if ((status == 0)); then
    echo "$message: done in $((SECONDS - started)) s"
    rm -f "$log"
else
    tail -n 40 "$log" >&2
    echo "$message: failed with status $status after $((SECONDS - started)) s (whole output: $log)" >&2
fi
exit "$status"
