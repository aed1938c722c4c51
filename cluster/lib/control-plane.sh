#!/usr/bin/env bash
# Usage: control-plane.sh NODES (run by `up` as the first process of the cluster's pid namespace, in its network namespace)
# Keeps etcd, the API server, the controllers, the scheduler, DNS and the nodes running. Ending this one process ends them all.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# /proc still shows the machine's pids here: this is the pid by which `down` ends the cluster.
read -r pid _ </proc/self/stat
record_process "$pid" init
mount -t proc proc /proc

PKI=$STATE_DIR/pki
ETCD=http://127.0.0.1:2379
PATH=$(bin_dir):$PATH

# The data is thrown away with the cluster, so waiting for the disk would buy nothing.
keep etcd etcd --name offramp --data-dir "$STATE_DIR/etcd" --unsafe-no-fsync --log-level warn \
    --listen-client-urls $ETCD --advertise-client-urls $ETCD \
    --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 \
    --initial-cluster offramp=http://127.0.0.1:2380

keep apiserver kube-apiserver --v=1 --etcd-servers=$ETCD \
    --bind-address=0.0.0.0 --secure-port=6443 --advertise-address="$CONTROL_PLANE_IP" --cert-dir="$STATE_DIR/apiserver" \
    --tls-cert-file="$PKI/apiserver.crt" --tls-private-key-file="$PKI/apiserver.key" --client-ca-file="$PKI/ca.crt" \
    --service-cluster-ip-range="$SERVICE_CIDR" \
    --service-account-issuer=https://kubernetes.default.svc.cluster.local \
    --service-account-key-file="$PKI/service-accounts.pub" --service-account-signing-key-file="$PKI/service-accounts.key" \
    --kubelet-certificate-authority="$PKI/ca.crt" --kubelet-preferred-address-types=InternalIP \
    --kubelet-client-certificate="$PKI/apiserver-kubelet-client.crt" --kubelet-client-key="$PKI/apiserver-kubelet-client.key" \
    --requestheader-client-ca-file="$PKI/front-proxy-ca.crt" --requestheader-allowed-names=front-proxy-client \
    --requestheader-extra-headers-prefix=X-Remote-Extra- --requestheader-group-headers=X-Remote-Group \
    --requestheader-username-headers=X-Remote-User --enable-aggregator-routing=true \
    --proxy-client-cert-file="$PKI/front-proxy-client.crt" --proxy-client-key-file="$PKI/front-proxy-client.key" \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true

# One of each, so there is no leader to elect; pods get their addresses from the CNI, not from the controller manager.
# Autoscalers look every 5 s instead of 15, because stories are told in a minute.
keep controller-manager kube-controller-manager --v=1 --leader-elect=false --bind-address=127.0.0.1 \
    --kubeconfig="$PKI/controller-manager.conf" --authentication-kubeconfig="$PKI/controller-manager.conf" \
    --authorization-kubeconfig="$PKI/controller-manager.conf" --cert-dir="$STATE_DIR/controller-manager" \
    --root-ca-file="$PKI/ca.crt" --client-ca-file="$PKI/ca.crt" --requestheader-client-ca-file="$PKI/front-proxy-ca.crt" \
    --cluster-signing-cert-file="$PKI/ca.crt" --cluster-signing-key-file="$PKI/ca.key" \
    --service-account-private-key-file="$PKI/service-accounts.key" --use-service-account-credentials=true \
    --service-cluster-ip-range="$SERVICE_CIDR" --allocate-node-cidrs=false --horizontal-pod-autoscaler-sync-period=5s

keep scheduler kube-scheduler --v=1 --leader-elect=false --bind-address=127.0.0.1 --kubeconfig="$PKI/scheduler.conf" \
    --authentication-kubeconfig="$PKI/scheduler.conf" --authorization-kubeconfig="$PKI/scheduler.conf" \
    --cert-dir="$STATE_DIR/scheduler"

cat >"$STATE_DIR/Corefile" <<EOF
cluster.local:53 in-addr.arpa:53 {
    errors
    ready 127.0.0.1:8181
    loadbalance
    kubernetes cluster.local in-addr.arpa {
        kubeconfig $KUBECONFIG_INSIDE offramp
        ttl 5
    }
}
EOF
keep coredns coredns -quiet -conf "$STATE_DIR/Corefile"

for ((i = 1; i <= $1; i++)); do
    nsenter --net="/run/netns/$(node_netns "$i")" unshare --mount --propagation private "$CLUSTER_DIR/lib/node.sh" "$i" \
        >"$STATE_DIR/log/node$i.log" 2>&1 &
done
wait
