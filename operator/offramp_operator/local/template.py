"""What a worker process is started with: the embedded shell's counterpart of a pod template."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offramp_core.control.spec import ServiceSpec
from offramp_core.errors import InvalidSpecError
from offramp_core.plan import canonical_json
from offramp_core.processors import within_quota
from offramp_operator.shell.variables import option_variables

_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_FILE = "file://"
CLUSTER_ONLY = frozenset(
    {
        "image",
        "imagePullPolicy",
        "imagePullSecrets",
        "resources",
        "nodeSelector",
        "tolerations",
        "affinity",
        "topologySpreadConstraints",
        "priorityClassName",
        "runtimeClassName",
        "schedulerName",
        "labels",
        "annotations",
        "className",
        "resourceClaims",
        "tmp",
        "sharedMemory",
        "startupDeadline",
        "disruptionBudget",
    }
)


@dataclass(frozen=True, slots=True)
class WorkerTemplate:
    """Everything whose change needs another process. ``env`` holds the user's own variables, ``options`` those of the
    spec's options."""

    service: str
    service_uid: str
    bundle: str
    threads: int
    latency_seconds: float | None
    model_digest: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> str:
        """Equal templates have equal digests."""
        return hashlib.sha256(canonical_json(asdict(self))).hexdigest()[:16]


def render(service: str, service_uid: str, spec: ServiceSpec, *, cpus: int | None = None) -> WorkerTemplate:
    """The template a spec asks for. Workers share the CPUs of this machine evenly.

    Raises
    ------
    InvalidSpecError
        Names the field that this machine cannot serve.
    """
    check_local(spec)
    available = cpus if cpus is not None else available_cpus()
    return WorkerTemplate(
        service=service,
        service_uid=service_uid,
        bundle=str(bundle_path(spec.model_uri)),
        threads=max(1, available // max(1, spec.replicas)),
        latency_seconds=spec.latency_seconds,
        model_digest=spec.model_digest,
        env=worker_env(spec.worker),
        options=tuple(sorted(option_variables(spec).items())),
    )


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that all workers here have together: in a container fewer than the machine has."""
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # without cgroup v2, what the kernel lets this process run on
        allowed = within_quota(allowed, (cgroup / "cpu.max").read_text())
    return allowed


def bundle_path(uri: str, *, base: Path | None = None) -> Path:
    """The folder a ``file://`` URI means, relative ones counted from ``base``.

    Raises
    ------
    InvalidSpecError
        The URI names an image or a claim, which only a cluster can mount.
    """
    if not uri.startswith(_FILE):
        what = "a PersistentVolumeClaim" if uri.startswith("pvc://") else "an image"
        raise InvalidSpecError(
            "spec.model.uri",
            f"{uri} is {what}, and mounting one needs Kubernetes; here, write file://FOLDER with the bundle that "
            "`offramp prepare` made",
        )
    path = Path(uri.removeprefix(_FILE)).expanduser()
    return path if path.is_absolute() or base is None else (base / path).resolve()


def check_local(spec: ServiceSpec) -> None:
    """Refuse what one machine does not do: scale, or speak what its one address before all workers does not.

    That proxy moves connections between requests, as HTTP/1 allows.
    """
    if spec.autoscaling is not None:
        raise InvalidSpecError("spec.autoscaling", "needs Kubernetes; here, write spec.replicas")
    if spec.pools:
        raise InvalidSpecError("spec.pools", "need Kubernetes and its nodes; here, write spec.replicas")
    if spec.shared_pool:
        raise InvalidSpecError(
            "spec.sharing",
            "needs Kubernetes; here, `offramp serve NAME=DIR NAME=DIR` serves several models in one worker",
        )
    if spec.update_policy.side_by_side is not None:
        raise InvalidSpecError(
            "spec.updatePolicy.sideBySide", "needs Kubernetes; here, remove it: workers are replaced one by one"
        )
    if spec.route is not None:
        raise InvalidSpecError("spec.route", "needs Kubernetes and a Gateway; here, remove it")
    if "GRPC" in spec.protocols:
        raise InvalidSpecError(
            "spec.protocols", "GRPC needs Kubernetes here; `offramp serve --grpc-port` opens it on one worker"
        )


def worker_env(worker: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The user's variables in ``spec.worker.env``, checked by the rules of the CRD."""
    unknown = sorted(set(worker) - CLUSTER_ONLY - {"env"})
    if unknown:
        raise InvalidSpecError(f"spec.worker.{unknown[0]}", "unknown field")
    entries = worker.get("env", [])
    if not isinstance(entries, list):
        raise InvalidSpecError("spec.worker.env", f"must be a list of name and value; got {entries!r}")
    return tuple(_env_entry(entry, f"spec.worker.env[{index}]") for index, entry in enumerate(entries))


def _env_entry(entry: Any, where: str) -> tuple[str, str]:
    if not isinstance(entry, Mapping) or set(entry) != {"name", "value"}:
        raise InvalidSpecError(where, f"needs name and value, and nothing else; got {entry!r}")
    name, value = entry["name"], entry["value"]
    if not isinstance(name, str) or not _ENV_NAME.match(name):
        raise InvalidSpecError(
            f"{where}.name", f"{name!r} must contain only letters, digits and '_', and not start with a digit"
        )
    if name.startswith("OFFRAMP_"):
        raise InvalidSpecError(f"{where}.name", f"{name}: names that start with OFFRAMP_ are set by Offramp")
    if not isinstance(value, str):
        raise InvalidSpecError(f"{where}.value", f"must be a quoted text; got {value!r}")
    return name, value


def ignored_fields(worker: Mapping[str, Any]) -> tuple[str, ...]:
    """Fields of ``spec.worker`` that mean something only in a cluster."""
    return tuple(sorted(set(worker) & CLUSTER_ONLY))
