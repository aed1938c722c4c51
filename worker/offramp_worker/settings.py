"""A worker's settings, parsed once from the environment.

| variable | meaning |
|---|---|
| OFFRAMP_BUNDLE | folder of the exit bundle (required) |
| OFFRAMP_HOST, OFFRAMP_PORT, OFFRAMP_ADMIN_PORT | 0.0.0.0, 8080, 8081; port 0 lets the system choose |
| OFFRAMP_GRPC_PORT | port for gRPC; not opened unless set |
| OFFRAMP_SERVICE, OFFRAMP_SERVICE_UID | whose plans to take |
| OFFRAMP_UID | this worker (the pod's uid); default: the host's name |
| OFFRAMP_PUBLIC_KEY | base64 of the raw Ed25519 key that signs plans |
| OFFRAMP_TOKEN_SHA256 | hex SHA-256 of the admin port's bearer token; without it the admin port stays closed |
| OFFRAMP_PLAN_FILE | file with the signed plan document, polled by content |
| OFFRAMP_FIXED_PLAN | file with a certified RampConfig in JSON, served without a control plane |
| OFFRAMP_MODEL_NAME | the model's name in the protocol; default: the bundle's |
| OFFRAMP_STATE_DIR | small writable folder that survives a restart of the process |
| OFFRAMP_RAMP_SETS | folder of the ramp-set store: heads that plans may name besides the bundle's own |
| OFFRAMP_CAPTURE_DIR, OFFRAMP_CAPTURE_BYTES | folder for inputs that may train ramps, kept only while a plan document
asks for it; at most so many bytes (64 MiB) |
| OFFRAMP_MODEL_DIGEST | the backbone digest this worker must serve |
| OFFRAMP_THREADS | threads per session; default: CPUs this process may use, by its affinity and its cgroup's quota |
| OFFRAMP_MEASURE_SECONDS | how long whole batches run before the worker is ready, to tell their pace; default: none |
| OFFRAMP_FEEDBACK_ROWS | answers kept for true labels that clients may send later; 0 (default) is off |
| OFFRAMP_RECEIVE_SECONDS | how long a request may take to arrive; default 30 |
| OFFRAMP_LATENCY_SECONDS | latency objective: batches adapt to it, and what cannot meet it is refused |
| OFFRAMP_BATCHING | how batches form: offramp (default), tf-serving, clockwork, none |
| OFFRAMP_CACHE_BYTES | memory for answers to inputs seen before; 0 (default) is off |
| OFFRAMP_CORE, OFFRAMP_UPLINK, OFFRAMP_RESIDUE, OFFRAMP_OFFLINE, OFFRAMP_EDGES | edge and core: see
:mod:`offramp_core.edge_settings` |
| OTEL_TRACES_EXPORTER | none (default), or otlp: spans of requests, to where the other OTEL_* variables say |
| OFFRAMP_DEADLINE_ANSWERS | who gets the best answer so far instead of a late one: on-request (default), always |
"""

from __future__ import annotations

import base64
import binascii
import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from offramp_core.batching import BATCHING
from offramp_core.edge_settings import EdgeSettings, edge_settings, takes_edges
from offramp_core.errors import InvalidArgumentError
from offramp_core.processors import within_quota

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
SHA256_HEX = re.compile(r"[0-9a-f]{64}")
ED25519_KEY_BYTES = 32
MAX_FEEDBACK_ROWS = 10_000_000
MAX_CACHE_BYTES = 2**40
DEADLINE_ANSWERS = ("on-request", "always")
TRACING = ("none", "otlp")


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a worker process. ``public_key`` and ``token_sha256`` come together or not at all."""

    bundle: Path
    #: What clients call the model; default: as its bundle does.
    model_name: str = ""
    host: str = "0.0.0.0"  # noqa: S104 - a pod serves its network; the CLI asks for loopback
    port: int = 8080
    admin_port: int = 8081
    grpc_port: int | None = None
    service: str = ""
    service_uid: str = ""
    uid: str = ""
    public_key: bytes | None = None
    token_sha256: str | None = field(default=None, repr=False)
    plan_file: Path | None = None
    fixed_plan: Path | None = None
    state_dir: Path | None = None
    ramp_set_store: Path | None = None
    capture_dir: Path | None = None
    capture_bytes: int = 64 * 1024 * 1024
    model_digest: str | None = None
    threads: int = 1
    latency_seconds: float | None = None
    feedback_rows: int = 0
    measure_seconds: float | None = None
    receive_seconds: float = 30.0
    batching: str = "offramp"
    cache_bytes: int = 0
    always_in_time: bool = False
    tracing: str = "none"
    #: Of an edge; None for any other worker.
    edge: EdgeSettings | None = None
    #: Whether it is a core, which takes what edges send.
    takes_edges: bool = False
    max_queue_rows: int = 1024
    max_body_bytes: int = 64 * 1024 * 1024
    max_bodies_bytes: int = 128 * 1024 * 1024  # of all requests together
    poll_seconds: float = 2.0
    drain_seconds: float = 18.0  # in all, from the signal on: replies first, then audits

    @property
    def has_control_plane(self) -> bool:
        """Whether plans can be delivered and the admin port is opened."""
        return self.public_key is not None and self.token_sha256 is not None


def settings_from_env(env: Mapping[str, str]) -> Settings:
    """Parse the environment.

    Raises
    ------
    InvalidArgumentError
        Names the variable, its value and what it must be.
    """
    bundle = env.get("OFFRAMP_BUNDLE", "")
    if not bundle:
        raise InvalidArgumentError("OFFRAMP_BUNDLE is not set; give the folder that `offramp prepare` wrote")
    settings = Settings(
        bundle=Path(bundle),
        host=env.get("OFFRAMP_HOST", "") or "0.0.0.0",  # noqa: S104
        port=integer_from(env, "OFFRAMP_PORT", 8080, high=65535),
        admin_port=integer_from(env, "OFFRAMP_ADMIN_PORT", 8081, high=65535),
        grpc_port=integer_from(env, "OFFRAMP_GRPC_PORT", 0, high=65535) if env.get("OFFRAMP_GRPC_PORT") else None,
        service=env.get("OFFRAMP_SERVICE", ""),
        service_uid=env.get("OFFRAMP_SERVICE_UID", ""),
        uid=env.get("OFFRAMP_UID", "") or socket.gethostname(),
        public_key=_public_key(env.get("OFFRAMP_PUBLIC_KEY", "")),
        token_sha256=token_from(env),
        plan_file=_path(env, "OFFRAMP_PLAN_FILE"),
        fixed_plan=_path(env, "OFFRAMP_FIXED_PLAN"),
        model_name=_model_name(env),
        state_dir=_path(env, "OFFRAMP_STATE_DIR"),
        ramp_set_store=_path(env, "OFFRAMP_RAMP_SETS"),
        capture_dir=_path(env, "OFFRAMP_CAPTURE_DIR"),
        capture_bytes=integer_from(env, "OFFRAMP_CAPTURE_BYTES", 64 * 1024 * 1024, low=1, high=MAX_CACHE_BYTES),
        model_digest=_matching(env, "OFFRAMP_MODEL_DIGEST", DIGEST, "sha256: and 64 lower-case hex digits"),
        threads=integer_from(env, "OFFRAMP_THREADS", available_cpus(), low=1, high=1024),
        latency_seconds=seconds_from(env, "OFFRAMP_LATENCY_SECONDS"),
        feedback_rows=integer_from(env, "OFFRAMP_FEEDBACK_ROWS", 0, high=MAX_FEEDBACK_ROWS),
        measure_seconds=seconds_from(env, "OFFRAMP_MEASURE_SECONDS"),
        receive_seconds=seconds_from(env, "OFFRAMP_RECEIVE_SECONDS") or 30.0,
        batching=env.get("OFFRAMP_BATCHING", "") or "offramp",
        cache_bytes=integer_from(env, "OFFRAMP_CACHE_BYTES", 0, high=MAX_CACHE_BYTES),
        always_in_time=_always_in_time(env),
        tracing=_choice(env, "OTEL_TRACES_EXPORTER", TRACING),
        edge=edge_settings(env),
        takes_edges=takes_edges(env),
    )
    _check_batching(settings)
    _check_control_plane(settings)
    return settings


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs this process may use: its affinity, cut by the cgroup's quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        return within_quota(allowed, (cgroup / "cpu.max").read_text())
    except (OSError, ValueError):
        return allowed  # no cgroup v2 here: affinity is all there is to know


def _check_batching(settings: Settings) -> None:
    if settings.batching not in BATCHING:
        raise InvalidArgumentError(f"OFFRAMP_BATCHING is {settings.batching!r}; choose from {', '.join(BATCHING)}")
    if settings.batching == "clockwork" and settings.latency_seconds is None:
        raise InvalidArgumentError("OFFRAMP_BATCHING is 'clockwork', which needs OFFRAMP_LATENCY_SECONDS")
    if settings.always_in_time and settings.latency_seconds is None:
        raise InvalidArgumentError("OFFRAMP_DEADLINE_ANSWERS is 'always', which needs OFFRAMP_LATENCY_SECONDS")


def _always_in_time(env: Mapping[str, str]) -> bool:
    return _choice(env, "OFFRAMP_DEADLINE_ANSWERS", DEADLINE_ANSWERS) == "always"


def _choice(env: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    """One of some words; the first is the default."""
    text = env.get(name, "") or choices[0]
    if text not in choices:
        raise InvalidArgumentError(f"{name} is {text!r}; choose from {', '.join(choices)}")
    return text


def _check_control_plane(settings: Settings) -> None:
    if (settings.public_key is None) != (settings.token_sha256 is None):
        missing = "OFFRAMP_TOKEN_SHA256" if settings.token_sha256 is None else "OFFRAMP_PUBLIC_KEY"
        raise InvalidArgumentError(
            f"{missing} is not set; the admin port needs both the public key and the token's hash"
        )
    if settings.public_key is not None and not settings.service_uid:
        raise InvalidArgumentError("OFFRAMP_SERVICE_UID is not set; with a public key it says whose plans to take")
    if settings.public_key is not None and settings.fixed_plan is not None:
        raise InvalidArgumentError(
            "OFFRAMP_FIXED_PLAN is set and so is OFFRAMP_PUBLIC_KEY; a control plane brings plans"
        )


def token_from(env: Mapping[str, str]) -> str | None:
    """The hash of the admin port's token; raises as :func:`settings_from_env` does."""
    return _matching(env, "OFFRAMP_TOKEN_SHA256", SHA256_HEX, "64 lower-case hex digits")


def integer_from(env: Mapping[str, str], name: str, default: int, *, low: int = 0, high: int) -> int:
    """A whole number; raises as :func:`settings_from_env` does."""
    text = env.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or not low <= int(text) <= high:
        raise InvalidArgumentError(f"{name} is {text!r}; it must be a whole number from {low} to {high}")
    return int(text)


def share_from(env: Mapping[str, str], name: str, default: float, *, highest: float) -> float:
    """A share from 0 to ``highest``; raises as :func:`settings_from_env` does."""
    text = env.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= highest:
        raise InvalidArgumentError(f"{name} is {text!r}; it must be a number from 0 to {highest:g}")
    return value


def seconds_from(env: Mapping[str, str], name: str) -> float | None:
    """A positive number of seconds, None where nothing is set; raises as :func:`settings_from_env` does."""
    text = env.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise InvalidArgumentError(f"{name} is {text!r}; it must be a positive number of seconds")
    return value


def _model_name(env: Mapping[str, str]) -> str:
    name = env.get("OFFRAMP_MODEL_NAME", "")
    if "/" in name or name in {".", ".."} or not name.isprintable():
        raise InvalidArgumentError(
            f"OFFRAMP_MODEL_NAME is {name!r}; it stands in paths, so give one without slashes that is not '.' or '..'"
        )
    return name


def _path(env: Mapping[str, str], name: str) -> Path | None:
    return Path(env[name]) if env.get(name) else None


def _matching(env: Mapping[str, str], name: str, pattern: re.Pattern[str], wanted: str) -> str | None:
    text = env.get(name, "")
    if not text:
        return None
    if not pattern.fullmatch(text):
        raise InvalidArgumentError(f"{name} has {len(text)} characters; it must be {wanted}")  # value may be a secret
    return text


def _public_key(text: str) -> bytes | None:
    if not text:
        return None
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error:
        raw = b""
    if len(raw) != ED25519_KEY_BYTES:
        raise InvalidArgumentError(f"OFFRAMP_PUBLIC_KEY must be base64 of {ED25519_KEY_BYTES} bytes; got {len(raw)}")
    return raw
