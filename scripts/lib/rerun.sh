# shellcheck shell=bash
# Sourced by scripts/test. The machine may be shared and noisy: one test of a whole run may fail beside others and be run once more by itself.
# It is named in the last line. A second failure of it is one, and so is a second test that fails.

again=""   # the test that passed only by itself
failed=()  # tests that count as failed

# run STAGE OPTION...: pytest with these options; what it keeps between runs is the stage's own.
run() {
    local cache=$log/$1
    shift
    rm -rf "$cache"
    "$pytest" -q -o cache_dir="$cache" "$@" && return
    last_failed "$cache"
    ((${#failed[@]} == 1)) && [[ -z $again ]] || return 1
    say "failed beside others, once more by itself: ${failed[0]}"
    "$pytest" -q -o cache_dir="$cache" "$@" -n 0 --last-failed || return 1
    again=${failed[0]}
    failed=()
}

last_failed() {
    mapfile -t failed < <(sed -n 's/^ *"\(.*::.*\)": true,\?$/\1/p' "$1/v/cache/lastfailed" 2> /dev/null || true)
}
