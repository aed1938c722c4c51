# shellcheck shell=bash
# shellcheck disable=SC2034
# Names, paths and small helpers of the cluster commands. Sourced, never run.
set -euo pipefail

CLUSTER_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
REPO_DIR=$(dirname "$CLUSTER_DIR")
CACHE_DIR=${OFFRAMP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/offramp}
STATE_DIR=$REPO_DIR/build/cluster
KUBECONFIG_FILE=$STATE_DIR/kubeconfig
KUBECONFIG_INSIDE=$STATE_DIR/kubeconfig-inside  # for commands that run in a node's network namespace
RESOLV_CONF=$STATE_DIR/resolv.conf              # likewise

# One name per clone, so that two clones on one machine never touch each other's namespaces and cgroups.
CLUSTER_NAME=offramp-$(printf %s "$REPO_DIR" | sha256sum | cut -c1-8)
# Pids and sockets live outside the clone: they must outlast an `rm -rf build` and must not outlast a reboot,
# and a socket's path has to stay short.
RUN_DIR=/run/$CLUSTER_NAME

KUBERNETES_VERSION=v1.36.3
POD_CIDR_PREFIX=10.244       # node N hands out 10.244.N.0/24
SERVICE_CIDR=10.96.0.0/16
KUBERNETES_SERVICE_IP=10.96.0.1
CONTROL_PLANE_IP=10.250.0.1  # node N is 10.250.0.(10+N); all of it exists only inside the cluster's own namespaces
MAX_NODES=9

# The Debian /usr/bin/python3, not whatever a version manager put first in PATH.
PYTHON=/usr/bin/python3
[[ -x $PYTHON ]] || PYTHON=$(command -v python3 || true)
PATH=$PATH:/usr/sbin:/sbin

node_netns() { printf '%s-node%d' "$CLUSTER_NAME" "$1"; }
node_ip() { printf '10.250.0.%d' $((10 + $1)); }
node_socket() { printf '%s/node%d/containerd.sock' "$RUN_DIR" "$1"; }

say() { printf '%s\n' "$*" >&2; }
fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    (($# == 0)) || printf 'hint: %s\n' "$@" >&2
    exit 1
}

# step TEXT: says that the work since the last step (or start_clock) is done, and what it took.
start_clock() { STEP_START=$EPOCHREALTIME; [[ -n ${CLOCK_START:-} ]] || CLOCK_START=$STEP_START; }
seconds_since() { local us=$((${EPOCHREALTIME/[.,]/} - ${1/[.,]/})); printf '%d.%d' $((us / 1000000)) $((us / 100000 % 10)); }
step() {
    printf '%7s s  %s\n' "$(seconds_since "$STEP_START")" "$1" >&2
    STEP_START=$EPOCHREALTIME
}

# wait_for SECONDS COMMAND...: polls until the command succeeds; 1 when the time is over.
wait_for() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < deadline)) || return 1
        sleep 0.1
    done
}

docker_answers() { command -v docker >/dev/null && timeout 10 docker info >/dev/null 2>&1; }

# up_with_kind: the running cluster is kind's (decided once by `up`, so that later commands agree with it).
up_with_kind() { [[ -e $STATE_DIR/kind ]]; }
is_recorded_up() { [[ -e $STATE_DIR/bin-dir ]]; }
require_up() { is_recorded_up || fail "the cluster is not up" "run 'make cluster' (or cluster/up) first"; }
bin_dir() { cat "$STATE_DIR/bin-dir"; }
node_count() { cat "$STATE_DIR/nodes"; }

# A process is known by its pid and its start time, so that a reused pid is never taken for ours.
start_time() {
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    stat=${stat##*) }
    [[ $stat != Z* ]] || return 1  # it has ended; only nobody has asked for its exit status yet
    cut -d' ' -f20 <<<"$stat"
}
record_process() { printf '%d %s\n' "$1" "$(start_time "$1")" >"$RUN_DIR/$2.pid"; }
recorded_pid() {  # recorded_pid NAME: prints the pid if that very process still runs
    local pid started
    read -r pid started 2>/dev/null <"$RUN_DIR/$1.pid" && [[ $(start_time "$pid") == "$started" ]] && printf '%d' "$pid"
}

require_root() {
    ((EUID == 0)) || fail "a cluster without Docker needs root (network namespaces, mounts, cgroups)" \
        "run it as root, or start Docker so that kind can be used"
}

# keep NAME COMMAND...: runs a part in the background and starts it again should it end, as a service manager would.
keep() {
    local log=$STATE_DIR/log/$1.log status
    shift
    while true; do
        status=0
        "$@" >>"$log" 2>&1 || status=$?
        printf '%(%FT%T)T %s ended with status %d; starting it again\n' -1 "$1" "$status" >>"$log"
        sleep 1
    done &
}

write_resolv_conf() {  # write_resolv_conf NAME-SERVER: as pods of the namespace "default" see it
    printf 'nameserver %s\nsearch default.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5 timeout:1 attempts:2\n' \
        "$1" >"$RESOLV_CONF"
}

# The lock is the folder itself, so no lock file stays behind. Daemons must be started with 9>&-.
lock_cluster() { exec 9<"$CLUSTER_DIR"; flock 9; }
