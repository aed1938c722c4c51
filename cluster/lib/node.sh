#!/usr/bin/env bash
# Usage: node.sh INDEX (run by control-plane.sh in the node's own network and mount namespace)
# One node: containerd, kubelet and kube-proxy, seeing folders and kernel settings of their own. The mounts end with the node.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

INDEX=$1
NODE=node$INDEX
NODE_DIR=$STATE_DIR/$NODE
SOCKET=$(node_socket "$INDEX")
BIN=$(bin_dir)
export PATH=$BIN:$PATH

# kubelet insists on these settings of the whole machine; it is shown them instead.
declare -A SHOWN_SYSCTLS=(
    [vm/overcommit_memory]=1
    [vm/panic_on_oom]=0
    [kernel/panic]=10
    [kernel/panic_on_oops]=1
    [kernel/keys/root_maxkeys]=1000000
    [kernel/keys/root_maxbytes]=25000000
)

private_mounts() {
    # sysfs belongs to a network namespace, so it is mounted anew; the cgroup tree below it is the machine's.
    mkdir -p "$NODE_DIR/cgroup-tree"
    mount --rbind /sys/fs/cgroup "$NODE_DIR/cgroup-tree"
    mount -t sysfs sysfs /sys
    mount --rbind "$NODE_DIR/cgroup-tree" /sys/fs/cgroup
    umount -l "$NODE_DIR/cgroup-tree"
    mount --make-rshared /

    cp /etc/resolv.conf "$NODE_DIR/resolv.conf"  # before /run, where it often points to, is covered
    mkdir -p "$NODE_DIR"/{kubelet,containerd,log} "$NODE_DIR/run"
    mount --bind "$RUN_DIR" "$NODE_DIR/run"
    mount -t tmpfs -o mode=755 tmpfs /run
    mkdir -p "$RUN_DIR" /run/lock /run/netns
    mount --bind "$NODE_DIR/run" "$RUN_DIR"
    umount -l "$NODE_DIR/run"
    mount -t tmpfs -o mode=755 tmpfs /var/lib
    mkdir -p /var/lib/{kubelet,containerd,cni,kube-proxy}
    mount --bind "$NODE_DIR/kubelet" /var/lib/kubelet
    mount --bind "$NODE_DIR/containerd" /var/lib/containerd
    mount --bind "$NODE_DIR/log" /var/log
    mkdir -p /var/log/{pods,containers}

    local key file
    mkdir -p "$NODE_DIR/sysctl"
    for key in "${!SHOWN_SYSCTLS[@]}"; do
        [[ -e /proc/sys/$key ]] || continue
        file=$NODE_DIR/sysctl/${key//\//.}
        echo "${SHOWN_SYSCTLS[$key]}" >"$file"
        mount --bind "$file" "/proc/sys/$key"
    done
    echo 1 >/proc/sys/net/ipv4/ip_forward
    echo 1 >/proc/sys/net/ipv4/conf/all/route_localnet
}

# A clone that itself lies on an overlay cannot hold another overlay's upper folder; plain copies work anywhere.
pick_snapshotter() {
    local try=$NODE_DIR/overlay-try
    mkdir -p "$try"/{lower,upper,work,merged}
    if mount -t overlay overlay -o "lowerdir=$try/lower,upperdir=$try/upper,workdir=$try/work" "$try/merged" 2>/dev/null; then
        umount "$try/merged"
        echo overlayfs
    else
        echo native
    fi
    rm -rf "$try"
}

write_configuration() {
    mkdir -p "$NODE_DIR/cni" "$(dirname "$SOCKET")"
    cat >"$NODE_DIR/cni/10-offramp.conflist" <<EOF
{"cniVersion": "1.0.0", "name": "offramp", "plugins": [
  {"type": "ptp", "ipam": {"type": "host-local", "ranges": [[{"subnet": "$POD_CIDR_PREFIX.$INDEX.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}}
]}
EOF
    cat >"$NODE_DIR/containerd.toml" <<EOF
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.erofs", "io.containerd.snapshotter.v1.zfs", "io.containerd.nri.v1.nri",
  "io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp",
]
[grpc]
  address = "$SOCKET"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "$SNAPSHOTTER"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "localhost/pause:1"
[plugins.'io.containerd.cri.v1.runtime']
  disable_apparmor = true
  restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ["$BIN"]
  conf_dir = "$NODE_DIR/cni"
[plugins.'io.containerd.cri.v1.runtime'.containerd]
  default_runtime_name = "runc"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
  BinaryName = "$BIN/runc"
  SystemdCgroup = false
[plugins.'io.containerd.transfer.v1.local']
  [[plugins.'io.containerd.transfer.v1.local'.unpack_config]]
    platform = "linux"
    snapshotter = "$SNAPSHOTTER"
EOF
    # No registry can be reached, so an image that the garbage collector drops would be gone for good.
    cat >"$NODE_DIR/kubelet.yaml" <<EOF
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $STATE_DIR/pki/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $STATE_DIR/pki/$NODE-serving.crt
tlsPrivateKeyFile: $STATE_DIR/pki/$NODE-serving.key
containerRuntimeEndpoint: unix://$SOCKET
cgroupDriver: cgroupfs
cgroupRoot: /$CLUSTER_NAME/$NODE
failCgroupV1: false
failSwapOn: false
clusterDomain: cluster.local
clusterDNS: [$CONTROL_PLANE_IP]
resolvConf: $NODE_DIR/resolv.conf
makeIPTablesUtilChains: false
evictionHard: {memory.available: 200Mi, nodefs.available: "2%", imagefs.available: "2%"}
imageGCHighThresholdPercent: 100
syncFrequency: 10s
nodeStatusUpdateFrequency: 5s
EOF
    cat >"$NODE_DIR/kube-proxy.yaml" <<EOF
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: $STATE_DIR/pki/kube-proxy.conf}
hostnameOverride: $NODE
mode: nftables
nftables: {minSyncPeriod: 100ms}  # a new pod gets its share of a service at once, not a second later
clusterCIDR: $POD_CIDR_PREFIX.0.0/16
bindAddress: $(node_ip "$INDEX")
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
EOF
}

start_parts() {
    keep "$NODE-containerd" containerd --config "$NODE_DIR/containerd.toml"
    wait_for 180 ctr --address "$SOCKET" version || fail "containerd did not answer within 180 s"
    ctr --address "$SOCKET" --namespace k8s.io images import "$BIN/pause.tar"
    keep "$NODE-kubelet" kubelet --v=1 --config="$NODE_DIR/kubelet.yaml" --kubeconfig="$STATE_DIR/pki/$NODE.conf" \
        --root-dir=/var/lib/kubelet --hostname-override="$NODE" --node-ip="$(node_ip "$INDEX")"
    keep "$NODE-kube-proxy" kube-proxy --v=1 --config="$NODE_DIR/kube-proxy.yaml"
}

private_mounts
SNAPSHOTTER=$(pick_snapshotter)
write_configuration
start_parts
wait
