# shellcheck shell=bash
# Debian packages the cluster needs: installs the missing ones, asks for nothing when all are there.

# need_commands COMMAND=PACKAGE...: installs the packages of the commands that are not found.
need_commands() {
    local pair missing=()
    for pair; do
        command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
    done
    ((${#missing[@]} == 0)) || install_packages "${missing[@]}"
}

need_runtime_packages() {
    need_commands ip=iproute2 nft=nftables iptables=iptables nsenter=util-linux unshare=util-linux flock=util-linux \
        openssl=openssl python3=python3 mount=mount getent=libc-bin
}

need_compiler_packages() {
    need_commands gcc=gcc pkg-config=pkg-config
    # Headers carry no command of their own; a compile proves that they are there.
    local missing=()
    printf '#include <stdlib.h>\n' | gcc -E - >/dev/null 2>&1 || missing+=(libc6-dev)
    pkg-config --exists libseccomp || missing+=(libseccomp-dev)
    ((${#missing[@]} == 0)) || install_packages "${missing[@]}"
}

install_packages() {
    command -v apt-get >/dev/null || fail "these packages are missing: $*" "install them with this system's package manager"
    ((EUID == 0)) || fail "these packages are missing: $*" "run: sudo apt-get install $*"
    start_clock
    local apt=(apt-get -q -o DPkg::Lock::Timeout=300) log
    log=$(mktemp)
    if [[ -z ${APT_UPDATED:-} ]]; then
        "${apt[@]}" update >"$log" 2>&1 || { cat "$log" >&2; rm -f "$log"; fail "apt-get update failed"; }
        APT_UPDATED=1
    fi
    DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y --no-install-recommends "$@" >"$log" 2>&1 ||
        { cat "$log" >&2; rm -f "$log"; fail "apt-get could not install: $*"; }
    rm -f "$log"
    step "installed $*"
}
