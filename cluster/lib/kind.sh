# shellcheck shell=bash
# A cluster in containers of a Docker engine, by kind: the same commands for machines that have one.

KIND_LABEL=label=io.x-k8s.kind.cluster=$CLUSTER_NAME

kind_() { "$(bin_dir)/kind" "$@" --name "$CLUSTER_NAME"; }

kind_is_running() { [[ $(docker ps --quiet --filter "$KIND_LABEL" | wc -l) == "$(node_count)" ]]; }
kind_is_healthy() { kind_is_running && api_is_ready && nodes_are_ready; }

kind_up() {  # kind_up NODES: the first node carries the control plane as well
    local bin dns i
    bin=$("$CLUSTER_DIR/build" kind kubectl helm) || exit 1
    kind_stop_by "$bin/kind"
    mkdir -p "$STATE_DIR"
    printf '%s\n' "$bin" >"$STATE_DIR/bin-dir"
    printf '%d\n' "$1" >"$STATE_DIR/nodes"
    : >"$STATE_DIR/kind"
    {
        printf 'kind: Cluster\napiVersion: kind.x-k8s.io/v1alpha4\nfeatureGates: {ImageVolume: true}\nnodes: [{role: control-plane}'
        for ((i = 2; i <= $1; i++)); do printf ', {role: worker}'; done
        printf ']\n'
    } >"$STATE_DIR/kind.yaml"
    start_clock
    kind_ create cluster --config "$STATE_DIR/kind.yaml" --kubeconfig "$KUBECONFIG_FILE" --wait 180s >&2 ||
        fail "kind could not make the cluster" "cluster/down removes what it left"
    "$bin/kind" get kubeconfig --internal --name "$CLUSTER_NAME" >"$KUBECONFIG_INSIDE"
    dns=$(kubectl_ --namespace kube-system get service kube-dns -o 'jsonpath={.spec.clusterIP}')
    write_resolv_conf "$dns"
    step "kind cluster $CLUSTER_NAME"
}

kind_stop() { kind_stop_by "$(bin_dir)/kind"; }

# kind_stop_by KIND: deletes the containers and says what is left; 1 then.
kind_stop_by() {
    local left
    "$1" delete cluster --name "$CLUSTER_NAME" --kubeconfig "$KUBECONFIG_FILE" >&2
    rm -rf "$STATE_DIR"
    left=$(docker ps --all --filter "$KIND_LABEL" --format 'container {{.Names}}')
    [[ -z $left ]] || { printf 'left behind:\n%s\n' "$left" >&2; return 1; }
}
