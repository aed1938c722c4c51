# shellcheck shell=bash
# Certificates and kubeconfigs of one cluster. Made anew by every `up`: a key never outlives its cluster.

PKI_DIR=$STATE_DIR/pki
PKI_DAYS=3650
EC_KEY=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)

pki_authority() {  # pki_authority FILE COMMON-NAME
    openssl req -x509 "${EC_KEY[@]}" -days $PKI_DAYS -subj "/CN=$2" -keyout "$PKI_DIR/$1.key" -out "$PKI_DIR/$1.crt" \
        -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign,digitalSignature
}

pki_certificate() {  # pki_certificate FILE AUTHORITY SUBJECT clientAuth|serverAuth [SUBJECT-ALT-NAMES]
    local name=$PKI_DIR/$1
    openssl req -new "${EC_KEY[@]}" -subj "$3" -keyout "$name.key" -out "$name.csr"
    openssl x509 -req -in "$name.csr" -CA "$PKI_DIR/$2.crt" -CAkey "$PKI_DIR/$2.key" -CAcreateserial -days $PKI_DAYS \
        -out "$name.crt" -extfile <(
            printf 'basicConstraints=CA:FALSE\nkeyUsage=critical,digitalSignature,keyEncipherment\nextendedKeyUsage=%s\n' "$4"
            [[ -z ${5:-} ]] || printf 'subjectAltName=%s\n' "$5"
        )
    rm "$name.csr"
}

write_kubeconfig() {  # write_kubeconfig FILE USER SERVER
    (umask 077 && cat >"$1") <<EOF
apiVersion: v1
kind: Config
clusters: [{name: offramp, cluster: {server: "$3", certificate-authority-data: $(base64 -w0 "$PKI_DIR/ca.crt")}}]
users: [{name: $2, user: {client-certificate-data: $(base64 -w0 "$PKI_DIR/$2.crt"), client-key-data: $(base64 -w0 "$PKI_DIR/$2.key")}}]
contexts: [{name: offramp, context: {cluster: offramp, user: $2}}]
current-context: offramp
EOF
}

make_pki() {  # make_pki NODES HOST-PORT
    local i dns=DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local
    mkdir -m 700 "$PKI_DIR"
    {
        pki_authority ca offramp-cluster
        pki_authority front-proxy-ca offramp-cluster-front-proxy
        pki_certificate apiserver ca /CN=kube-apiserver serverAuth \
            "$dns,IP:127.0.0.1,IP:$KUBERNETES_SERVICE_IP,IP:$CONTROL_PLANE_IP"
        pki_certificate apiserver-kubelet-client ca /O=system:masters/CN=kube-apiserver-kubelet-client clientAuth
        pki_certificate front-proxy-client front-proxy-ca /CN=front-proxy-client clientAuth
        pki_certificate admin ca /O=system:masters/CN=kubernetes-admin clientAuth
        pki_certificate controller-manager ca /CN=system:kube-controller-manager clientAuth
        pki_certificate scheduler ca /CN=system:kube-scheduler clientAuth
        pki_certificate kube-proxy ca /CN=system:kube-proxy clientAuth
        for ((i = 1; i <= $1; i++)); do
            pki_certificate "node$i" ca "/O=system:nodes/CN=system:node:node$i" clientAuth
            pki_certificate "node$i-serving" ca "/O=system:nodes/CN=system:node:node$i" serverAuth \
                "DNS:node$i,IP:$(node_ip "$i"),IP:127.0.0.1"
        done
        openssl ecparam -name prime256v1 -genkey -noout -out "$PKI_DIR/service-accounts.key"
        openssl ec -in "$PKI_DIR/service-accounts.key" -pubout -out "$PKI_DIR/service-accounts.pub"
    } >"$STATE_DIR/log/pki.log" 2>&1 || fail "making certificates failed" "see $STATE_DIR/log/pki.log"

    local inside=https://$CONTROL_PLANE_IP:6443
    write_kubeconfig "$KUBECONFIG_FILE" admin "https://127.0.0.1:$2"
    write_kubeconfig "$KUBECONFIG_INSIDE" admin "$inside"
    write_kubeconfig "$PKI_DIR/controller-manager.conf" controller-manager "$inside"
    write_kubeconfig "$PKI_DIR/scheduler.conf" scheduler "$inside"
    write_kubeconfig "$PKI_DIR/kube-proxy.conf" kube-proxy "$inside"
    for ((i = 1; i <= $1; i++)); do write_kubeconfig "$PKI_DIR/node$i.conf" "node$i" "$inside"; done
}
