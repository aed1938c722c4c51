"""Plans in words: what leaves where, what is known of it, and what differs between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offramp_core.control.objects import Config, Prediction
from offramp_core.control.spec import ServiceSpec
from offramp_core.plan import Plan, format_threshold
from offramp_core.precision import EXACT
from offramp_operator.explain.words import share

NEVER = "-"


def ramps(plan: Plan, spec: ServiceSpec) -> str:
    """``r04-grid < 0.25, int8``; ``exits off``. Of a model that generates ``int4 < 0.25, then the model``, ``int8``."""
    if plan.exits_off:
        return spec.off
    listed = ", ".join(f"{r.id} < {format_threshold(r.threshold)}" for r in plan.ramps)
    if spec.generates and plan.ramps:
        return f"{listed}, then {'the model' if plan.precision == EXACT else plan.precision}"
    return listed if plan.precision == EXACT else ", ".join(filter(None, (listed, plan.precision)))


def certificate(config: Config) -> str:
    """The newest certificate in words; empty where none is needed or there is none."""
    if not config.status.certificates:
        return ""
    newest: Mapping[str, Any] = config.status.certificates[-1]
    text = f"certified for {share(float(newest['budget']))}"
    if "lost" in newest:
        text += f": {int(newest['n']):,} answers lost {share(float(newest['lost']) / int(newest['n']))} on average"
    elif "n" in newest and "k" in newest:
        text += f": {int(newest['k'])} of {int(newest['n']):,} answers differed"
    return text + (" (earned in its canary)" if newest.get("method") == "canary-acceptance" else "")


def predicted(promise: Prediction) -> str:
    """``27% (30% without audits)``: what a plan promises to save."""
    if not promise.audits:
        return share(promise.saving)
    return f"{share(round(promise.net, 4))} ({share(promise.saving)} without audits)"


def about(config: Config, spec: ServiceSpec) -> str:
    """One line on a plan."""
    facts = [ramps(config.plan, spec), certificate(config)]
    if not config.plan.exits_off and not config.status.certificates:
        facts.append("uncertified")
    prediction = config.status.prediction
    if prediction is not None:
        facts.append(f"predicted to save {predicted(prediction)} at {share(prediction.disagreement)} disagreement")
    return "; ".join(filter(None, facts))


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in both plans."""

    field: str
    a: str
    b: str

    @property
    def differs(self) -> bool:
        return self.a != self.b


def compare(a: Config, b: Config) -> list[Difference]:
    """Everything that can differ: thresholds by ramp, then the rest of the plans, then what is known of them."""
    thresholds = [{r.id: format_threshold(r.threshold) for r in config.plan.ramps} for config in (a, b)]
    ids = list(dict.fromkeys([*thresholds[0], *thresholds[1]]))
    rows = [Difference(f"ramp {i}", *(t.get(i, NEVER) for t in thresholds)) for i in ids]
    rows += [
        Difference(name, str(getattr(a.plan, field)), str(getattr(b.plan, field)))
        for name, field in (
            ("precision", "precision"),
            ("execution", "execution"),
            ("backbone", "backbone_digest"),
            ("ramp set", "ramp_set_digest"),
        )
    ]
    rows += [Difference(name, read(a), read(b)) for name, read in _KNOWN]
    return rows


_KNOWN = (
    ("state", lambda c: c.status.state),
    ("source", lambda c: c.status.source),
    ("certificate", lambda c: certificate(c) or NEVER),
    ("predicted saving", lambda c: predicted(c.status.prediction) if c.status.prediction else NEVER),
    ("predicted disagreement", lambda c: share(c.status.prediction.disagreement) if c.status.prediction else NEVER),
)


def comparison(a: Config, b: Config) -> dict[str, Any]:
    """The same for machines."""
    return {
        "a": a.name,
        "b": b.name,
        "fields": [{"field": r.field, "a": r.a, "b": r.b, "differs": r.differs} for r in compare(a, b)],
    }
