"""``get``: a service, its plans, its rollout and its workers as a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from offramp_cli.show.lines import Node, state, tree
from offramp_core.control.objects import Config, Rollout
from offramp_core.control.spec import ServiceSpec
from offramp_operator.explain.family import Family, WorkerSeen
from offramp_operator.explain.plans import about
from offramp_operator.explain.progress import figures, progress, workers_ready
from offramp_operator.explain.savings import sentences
from offramp_operator.explain.words import ago, duration

HEADER = ("NAME", "KIND", "STATUS", "AGE", "INFO")


def get_lines(families: Sequence[Family], now: float, *, wide: bool = False, namespaces: bool = False) -> list[Text]:
    """One tree per service; ``wide`` adds every plan and finished rollout, ``namespaces`` says where each service
    is."""
    return tree(HEADER, [_service(f, now, wide=wide, namespaces=namespaces) for f in families])


def get_data(families: Sequence[Family]) -> dict[str, Any]:
    """The stored objects."""
    return {
        "services": [
            {**f.manifests, "workers": None if f.workers is None else [_worker_data(w) for w in f.workers]}
            for f in families
        ]
    }


def _service(family: Family, now: float, *, wide: bool, namespaces: bool) -> Node:
    service, status = family.service, family.service.status
    name = f"{service.namespace}/{family.name}" if namespaces else family.name
    shown = {c.name for c in (family.stable, family.candidate) if c is not None}
    rollouts = [family.active] if family.active is not None else []
    if wide:
        rollouts = list(reversed(family.rollouts))
    savings = [Node(("savings", "", "", "", sentence)) for sentence in sentences(family)] if wide else []
    children = [_config(c, service.spec, now, serves=True) for c in (family.stable,) if c is not None] + savings
    children += [_rollout(r, family, now) for r in rollouts]
    if wide:
        children += [_config(c, service.spec, now) for name, c in sorted(family.configs.items()) if name not in shown]
    if status.tuning.state:
        children.append(Node(("tuning", "", state(status.tuning.state), "", status.tuning.message)))
    if status.pin.verdict or (status.pin.message and service.spec.mode == "Pinned"):
        children.append(Node(("pin", "", state(status.pin.verdict or "Pending"), "", status.pin.message)))
    children.append(_workers(family, now))
    phase = status.phase or "Unknown"
    info = family.note or (figures(family) if phase == "Ready" else status.message)
    return Node(
        (Text(name, style="bold"), "EarlyExitService", state(phase), ago(family.created_at, now), info), children
    )


def _config(config: Config, spec: ServiceSpec, now: float, *, serves: bool = False) -> Node:
    shown = state("Stable" if serves else config.status.state)
    return Node((config.name, "RampConfig", shown, ago(config.created_at, now), about(config, spec)))


def _rollout(rollout: Rollout, family: Family, now: float) -> Node:
    to = family.configs.get(rollout.to_config)
    info = progress(rollout, family) if not rollout.status.finished else rollout.status.message
    cells = (rollout.name, "RampRollout", state(rollout.status.phase), ago(rollout.created_at, now), info)
    return Node(
        cells, [_config(to, family.service.spec, now)] if to is not None and not rollout.status.finished else ()
    )


def _workers(family: Family, now: float) -> Node:
    workers, spec = family.service.status.workers, family.service.spec
    desired = workers.desired if workers.scaled_by else spec.replicas
    ready = "Ready" if workers.ready >= desired else "Progressing"
    children = [_worker(w, now) for w in family.workers or ()]
    return Node(("workers", "", state(ready), "", workers_ready(family)), children)


def _worker(worker: WorkerSeen, now: float) -> Node:
    age = "" if worker.created_at is None else duration(now - worker.created_at)
    return Node((worker.name, worker.kind, state(worker.state), age, worker.detail))


def _worker_data(worker: WorkerSeen) -> dict[str, Any]:
    return {"name": worker.name, "kind": worker.kind, "state": worker.state, "detail": worker.detail}
