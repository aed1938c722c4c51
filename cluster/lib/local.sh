# shellcheck shell=bash
# A cluster without Docker: starting it, asking for its health, and ending it without a trace.
source "$CLUSTER_DIR/lib/packages.sh"
source "$CLUSTER_DIR/lib/network.sh"
source "$CLUSTER_DIR/lib/pki.sh"

kubectl_() { "$(bin_dir)/kubectl" --kubeconfig="$KUBECONFIG_FILE" --request-timeout=30s "$@"; }

api_is_ready() { [[ $(kubectl_ get --raw /readyz 2>/dev/null) == ok ]]; }
nodes_are_ready() {
    local statuses
    statuses=$(kubectl_ get nodes -o 'jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}') || return 1
    [[ $statuses == "$(yes True | head -n "$(node_count)" | paste -sd' ')" ]]
}
dns_answers() { "$CLUSTER_DIR/exec-in-node" getent hosts kubernetes.default.svc.cluster.local; }
default_account_exists() { kubectl_ --namespace default get serviceaccount default; }

local_is_running() { [[ -n $(recorded_pid init) && -n $(recorded_pid relay) ]]; }
local_is_healthy() { local_is_running && api_is_ready && nodes_are_ready; }

free_port() {  # the first free one from 6443 on, where people look for an API server
    local port
    for ((port = 6443; port < 6543; port++)); do
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { printf '%d' "$port"; return; }
    done
    fail "no free port on 127.0.0.1 between 6443 and 6542" "ss -ltnp shows who listens"
}

local_up() {  # local_up NODES
    local port bin
    require_root
    need_runtime_packages
    local_stop || fail "what an earlier run left could not be removed; see above" "cluster/down lists it again"
    bin=$("$CLUSTER_DIR/build") || exit 1
    mkdir -p "$STATE_DIR/log" "$RUN_DIR"
    printf '%s\n' "$bin" >"$STATE_DIR/bin-dir"
    printf '%d\n' "$1" >"$STATE_DIR/nodes"
    port=$(free_port)
    start_clock
    make_pki "$1" "$port"
    write_resolv_conf "$CONTROL_PLANE_IP"
    make_network "$1"
    make_cgroups "$1"
    step "certificates, network namespaces and cgroups"
    setsid nsenter --net="/run/netns/$CLUSTER_NAME" unshare --pid --fork --mount --propagation private \
        "$CLUSTER_DIR/lib/control-plane.sh" "$1" </dev/null >"$STATE_DIR/log/control-plane.log" 2>&1 9>&- &
    setsid "$PYTHON" "$CLUSTER_DIR/lib/relay.py" "/run/netns/$CLUSTER_NAME" "$port" "$CONTROL_PLANE_IP:6443" \
        </dev/null >"$STATE_DIR/log/relay.log" 2>&1 9>&- &
    record_process $! relay
    wait_until "the API server is ready" api_is_ready
    wait_until "$1 node(s) Ready" nodes_are_ready
    wait_until "service accounts are made" default_account_exists
    wait_until "DNS answers" dns_answers
}

wait_until() {  # wait_until TEXT COMMAND: a step that must come true
    wait_for 300 "$2" || fail "not so within 300 s: $1" "the parts' logs are in $STATE_DIR/log" "cluster/down cleans up"
    step "$1"
}

# local_stop: ends the cluster's processes and removes all it made on the machine; prints what would not go, and is 1 then.
local_stop() {
    local pid left pid_namespace=
    if pid=$(recorded_pid init); then
        pid_namespace=$(readlink "/proc/$pid/ns/pid")
        kill -KILL "$pid"  # the first process of a pid namespace takes all others with it
    fi
    if pid=$(recorded_pid relay); then kill "$pid"; fi
    wait_for 120 no_processes_in "$pid_namespace" || true
    wait_for 60 remove_cgroups || true
    left=$(leftovers "$pid_namespace")
    remove_namespaces
    rm -rf --one-file-system "$STATE_DIR" "$RUN_DIR"
    left+=$(leftover_places)
    [[ -z $left ]] || { printf 'left behind:\n%s\n' "$left" >&2; return 1; }
}

# processes_in KIND NAMESPACE: the pids in a namespace ("pid:[4026532...]" or "net:[...]")
processes_in() {
    local link
    [[ -n $2 ]] || return 0
    for link in /proc/[0-9]*/ns/"$1"; do
        [[ $(readlink "$link" 2>/dev/null) != "$2" ]] || cut -d/ -f3 <<<"$link"
    done
}
no_processes_in() { [[ -z $(processes_in pid "$1") ]]; }

leftovers() {  # leftovers PID-NAMESPACE
    local pid netns
    for pid in $(processes_in pid "$1"); do describe_process "$pid"; done
    for netns in $(cluster_namespaces); do
        for pid in $(ip netns pids "$netns"); do describe_process "$pid"; done
    done
}
describe_process() { printf 'process %s: %s\n' "$1" "$(tr '\0' ' ' <"/proc/$1/cmdline" 2>/dev/null)"; }

leftover_places() {
    leftover_cgroups | sed 's/^/cgroup /'
    cluster_namespaces | sed 's/^/network namespace /'
    awk -v state="$STATE_DIR" -v run="$RUN_DIR" 'index($5, state) == 1 || index($5, run) == 1 {print "mount " $5}' /proc/self/mountinfo
    local dir
    for dir in "$STATE_DIR" "$RUN_DIR"; do [[ ! -e $dir ]] || printf 'folder %s\n' "$dir"; done
}
