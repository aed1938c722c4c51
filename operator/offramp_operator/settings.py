"""The operator's environment, read once."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from offramp_core.control.spec import parse_duration, parse_size
from offramp_core.errors import InvalidArgumentError, InvalidSpecError
from offramp_operator.kube.manifests import DeliverySettings, OperatorPods, WorkerSettings
from offramp_operator.kube.shards import MAX_SHARDS
from offramp_operator.shell.signing import SEED_BYTES, SigningKey

NETWORK_POLICIES = ("None", "Ingress", "IngressAndEgress")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class WebSettings:
    """The web page: its port, and the names it answers to besides addresses.

    It listens on the pod's loopback only, for those who may forward ports, unless ``address`` says under which address
    of the pod others reach it.
    """

    port: int
    address: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's environment. ``namespaces`` is empty for all of them."""

    namespaces: tuple[str, ...]
    lease_namespace: str
    lease_name: str
    workers: WorkerSettings
    signing_key_file: Path
    identity: str
    port: int = 8080
    web: WebSettings | None = None
    shards: int = 1
    log_level: int = logging.INFO


def parse_settings(environment: Mapping[str, str]) -> Settings:
    """Read the environment once.

    Raises
    ------
    InvalidArgumentError
        A variable is missing or malformed; the message names it.
    """
    return Settings(
        namespaces=_listed(environment, "OFFRAMP_NAMESPACES"),
        lease_namespace=_required(environment, "OFFRAMP_LEASE_NAMESPACE", "the namespace of the operator's Lease"),
        lease_name=_required(environment, "OFFRAMP_LEASE_NAME", "the name of the operator's Lease"),
        workers=_worker_settings(environment),
        signing_key_file=Path(_required(environment, "OFFRAMP_SIGNING_KEY_FILE", "a file with 32 secret bytes")),
        identity=environment.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        port=_number(environment, "OFFRAMP_PORT", "8080", most=65535, what="port"),
        web=_web(environment),
        shards=_number(environment, "OFFRAMP_SHARDS", "1", most=MAX_SHARDS),
        log_level=_log_level(environment),
    )


def _web(environment: Mapping[str, str]) -> WebSettings | None:
    if not environment.get("OFFRAMP_WEB_PORT", ""):
        return None
    address = environment.get("OFFRAMP_WEB_ADDRESS", "")
    try:
        literal = str(ipaddress.ip_address(address)) if address else ""
    except ValueError as error:
        raise InvalidArgumentError(f"OFFRAMP_WEB_ADDRESS is {address!r}; it must be the pod's IP address") from error
    port = _number(environment, "OFFRAMP_WEB_PORT", "", most=65535, what="port")
    return WebSettings(port, address=literal, names=_listed(environment, "OFFRAMP_WEB_HOSTS"))


def _number(environment: Mapping[str, str], name: str, default: str, *, most: int, what: str = "number") -> int:
    text = environment.get(name, default)
    if not text.isdigit() or not 1 <= int(text) <= most:
        raise InvalidArgumentError(f"{name} is {text!r}; it must be a {what} from 1 to {most}")
    return int(text)


def _log_level(environment: Mapping[str, str]) -> int:
    text = environment.get("OFFRAMP_LOG_LEVEL", "") or "info"
    if text not in LOG_LEVELS:
        raise InvalidArgumentError(f"OFFRAMP_LOG_LEVEL is {text!r}; choose from {', '.join(LOG_LEVELS)}")
    return logging.getLevelNamesMapping()[text.upper()]


def _listed(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(text.strip() for text in environment.get(name, "").split(",") if text.strip())


def _worker_settings(environment: Mapping[str, str]) -> WorkerSettings:
    image = _required(environment, "OFFRAMP_WORKER_IMAGE", "the image that workers run")
    policy = environment.get("OFFRAMP_WORKER_NETWORK_POLICY", "").strip() or "None"
    if policy not in NETWORK_POLICIES:
        choices = ", ".join(NETWORK_POLICIES)
        raise InvalidArgumentError(f"OFFRAMP_WORKER_NETWORK_POLICY is {policy!r}; choose from {choices}")
    plain = WorkerSettings(
        image,
        delivery=_delivery_settings(environment),
        pull_secrets=_listed(environment, "OFFRAMP_WORKER_PULL_SECRETS"),
    )
    if policy == "None":
        return plain
    labels = {
        "app.kubernetes.io/name": "offramp",
        "app.kubernetes.io/instance": _required(environment, "OFFRAMP_OPERATOR_INSTANCE", "the release's name"),
        "app.kubernetes.io/component": "operator",
    }
    namespace = _required(environment, "OFFRAMP_LEASE_NAMESPACE", "the namespace of the operator's Lease")
    operator = OperatorPods(namespace, labels)
    return replace(plain, admin_from=operator, allow_egress=policy == "Ingress")


def _delivery_settings(environment: Mapping[str, str]) -> DeliverySettings:
    """What bundles may be fetched, and from where."""
    private = environment.get("OFFRAMP_DELIVERY_ALLOW_PRIVATE_NETWORKS", "") or "false"
    if private not in ("true", "false"):
        raise InvalidArgumentError(f"OFFRAMP_DELIVERY_ALLOW_PRIVATE_NETWORKS is {private!r}; it must be true or false")
    size, timeout = (f"OFFRAMP_DELIVERY_{name}" for name in ("SIZE_LIMIT", "TIMEOUT"))
    try:
        size_bytes = parse_size(environment.get(size, "") or "16Gi", size)
        seconds = parse_duration(environment.get(timeout, "") or "1h", timeout)
    except InvalidSpecError as error:
        raise InvalidArgumentError(str(error)) from error
    if seconds < 1:
        raise InvalidArgumentError(f"{timeout} is {environment[timeout]!r}; it must be at least 1s")
    return DeliverySettings(private == "true", size_bytes, seconds)


def _required(environment: Mapping[str, str], name: str, meaning: str) -> str:
    value = environment.get(name, "").strip()
    if not value:
        raise InvalidArgumentError(f"{name} is not set; it must be {meaning}")
    return value


def read_signing_key(path: Path) -> SigningKey:
    """The key in a file of 32 secret bytes, raw (a mounted Secret) or as base64.

    Raises
    ------
    InvalidArgumentError
        The file cannot be read or holds something else.
    """
    try:
        content = path.read_bytes()
        seed = content if len(content) == SEED_BYTES else base64.b64decode(content.strip(), validate=True)
        return SigningKey(seed)
    except (OSError, binascii.Error, InvalidArgumentError) as error:
        raise InvalidArgumentError(f"{path} holds no signing key of {SEED_BYTES} bytes: {error}") from error
