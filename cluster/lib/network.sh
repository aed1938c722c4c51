# shellcheck shell=bash
# Network namespaces and cgroups of one cluster: the control plane has one namespace, every node has another, a bridge
# joins them. Nothing of it touches the machine's own interfaces, routes or firewall.

make_network() {  # make_network NODES
    local i j netns
    make_namespace "$CLUSTER_NAME"
    ip -n "$CLUSTER_NAME" link add bridge0 type bridge
    ip -n "$CLUSTER_NAME" addr add "$CONTROL_PLANE_IP/24" dev bridge0
    ip -n "$CLUSTER_NAME" link set bridge0 up
    for ((i = 1; i <= $1; i++)); do
        netns=$(node_netns "$i")
        make_namespace "$netns"
        ip link add "node$i" netns "$CLUSTER_NAME" type veth peer name eth0 netns "$netns"
        ip -n "$CLUSTER_NAME" link set "node$i" master bridge0 up
        ip -n "$netns" addr add "$(node_ip "$i")/24" dev eth0
        ip -n "$netns" link set eth0 up
        ip -n "$netns" route add default via "$CONTROL_PLANE_IP"
        # The API server calls webhooks and aggregated APIs by pod address.
        ip -n "$CLUSTER_NAME" route add "$POD_CIDR_PREFIX.$i.0/24" via "$(node_ip "$i")"
        for ((j = 1; j <= $1; j++)); do
            ((i == j)) || ip -n "$netns" route add "$POD_CIDR_PREFIX.$j.0/24" via "$(node_ip "$j")"
        done
    done
}

make_namespace() {
    # `ip netns` makes this folder a mount of its own on first use, and leaves it so.
    mountpoint -q /run/netns || : >"$RUN_DIR/made-run-netns"
    ip netns add "$1"
    ip -n "$1" link set lo up
}

cgroup_roots() {  # one per v1 controller, or the one v2 hierarchy
    local root
    for root in /sys/fs/cgroup /sys/fs/cgroup/*; do
        [[ -e $root/cgroup.procs && ! -L $root ]] || continue
        printf '%s\n' "$root"
        [[ $root != /sys/fs/cgroup ]] || return 0
    done
}

make_cgroups() {  # make_cgroups NODES: the folder each node's kubelet is told to keep its pods under
    local root i dir
    while IFS= read -r root; do
        [[ ! -e $root/cgroup.controllers ]] || enable_controllers "$root"
        make_cgroup "$root/$CLUSTER_NAME"
        for ((i = 1; i <= $1; i++)); do make_cgroup "$root/$CLUSTER_NAME/node$i"; done
    done < <(cgroup_roots)
}

make_cgroup() {
    mkdir -p "$1"
    # v1 cpusets start empty, and nothing can run in an empty one.
    [[ ! -e $1/cpuset.cpus || -e $1/cgroup.controllers ]] || { cat "$1/../cpuset.cpus" >"$1/cpuset.cpus"; cat "$1/../cpuset.mems" >"$1/cpuset.mems"; }
    [[ ! -e $1/cgroup.controllers ]] || enable_controllers "$1"
}

enable_controllers() {  # v2: hand every controller this folder has to its children
    local controller
    for controller in $(<"$1/cgroup.controllers"); do
        # A controller that the machine keeps for itself stays off; kubelet says so if it needs it.
        echo "+$controller" >"$1/cgroup.subtree_control" 2>/dev/null || true
    done
}

leftover_cgroups() {
    local root
    while IFS= read -r root; do
        [[ ! -d $root/$CLUSTER_NAME ]] || printf '%s\n' "$root/$CLUSTER_NAME"
    done < <(cgroup_roots)
}

remove_cgroups() {
    local dir
    while IFS= read -r dir; do
        find "$dir" -depth -type d -exec rmdir {} + 2>/dev/null
    done < <(leftover_cgroups)
    [[ -z $(leftover_cgroups) ]]
}

cluster_namespaces() { ip netns list | awk -v name="$CLUSTER_NAME" '$1 == name || index($1, name "-node") == 1 {print $1}'; }

remove_namespaces() {
    local netns
    for netns in $(cluster_namespaces); do ip netns del "$netns"; done
    if [[ -e $RUN_DIR/made-run-netns && -z $(ip netns list) ]]; then umount /run/netns && rmdir /run/netns; fi
}
