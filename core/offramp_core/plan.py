"""Plans: which ramps are active and when an input may leave.

A plan is content-addressed: its name is a hash of what it says, so equal proposals collapse into one
``RampConfig`` and a rejected one is recognised when it is proposed again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from decimal import ROUND_FLOOR, Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, Literal

from offramp_core.errors import InvalidArgumentError
from offramp_core.precision import EXACT, Precision, check_precision

THRESHOLD_STEP = Decimal("0.000001")  # uncertainty passes through a quantile table, so six decimals resolve it
MAX_ACTIVE_RAMPS = 6
MAX_TIERS = 8
NAME_HASH_LENGTH = 10

Execution = Literal["Auto", "ResultsOnly", "ComputeSaving"]


@dataclass(frozen=True, slots=True)
class RampThreshold:
    """Leave at ramp ``id`` when its uncertainty is strictly below ``threshold`` (0 = never)."""

    id: str
    threshold: Decimal

    def __post_init__(self) -> None:
        if not (Decimal(0) <= self.threshold <= Decimal(1)):
            raise InvalidArgumentError(f"threshold of ramp {self.id!r} is {self.threshold}; it must lie in [0, 1]")
        if self.threshold != self.threshold.quantize(THRESHOLD_STEP):
            raise InvalidArgumentError(f"threshold of ramp {self.id!r} is {self.threshold}; use at most 6 decimals")


@dataclass(frozen=True, slots=True)
class TierRamps:
    """At which of the plan's ramps requests of a tier may leave, and below which thresholds; none at a lower precision
    means that its backbone answers all of them."""

    name: str
    ramps: tuple[RampThreshold, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a worker runs: active ramps in network order, and the digests they belong to.

    ``precision`` says which graph of the backbone the stages are cut from, and so which one answers what no ramp does.
    At fp32 no ramps means exits off: the exact executor answers every request. That plan meets every accuracy budget by
    construction and is always a safe rollback target. At another precision no ramps means that its backbone answers
    everything.

    ``tiers`` have thresholds of their own for requests that ask for a smaller budget, by name. They leave at ramps of
    the plan, so that one batch serves all of them; a tier that is not listed takes no exits.
    """

    backbone_digest: str
    ramp_set_digest: str
    ramps: tuple[RampThreshold, ...] = ()
    precision: Precision = EXACT
    execution: Execution = "Auto"
    tiers: tuple[TierRamps, ...] = ()

    def __post_init__(self) -> None:
        ids = [ramp.id for ramp in self.ramps]
        if len(set(ids)) != len(ids):
            raise InvalidArgumentError(f"plan names a ramp twice: {ids}")
        if len(ids) > MAX_ACTIVE_RAMPS:
            raise InvalidArgumentError(f"plan has {len(ids)} active ramps; at most {MAX_ACTIVE_RAMPS} are allowed")
        if self.tiers:
            self._check_tiers()

    def _check_tiers(self) -> None:
        names = [tier.name for tier in self.tiers]
        if names != sorted(set(names)) or len(names) > MAX_TIERS:
            raise InvalidArgumentError(f"plan has the tiers {names}; at most {MAX_TIERS} are allowed, sorted by name")
        active = {ramp.id for ramp in self.ramps if ramp.threshold > 0}
        for tier in self.tiers:
            ids = [ramp.id for ramp in tier.ramps]
            if len(set(ids)) != len(ids) or not set(ids) <= active:
                raise InvalidArgumentError(f"tier {tier.name!r} has the ramps {ids}; name active ones, each once")

    @property
    def exits_off(self) -> bool:
        """Whether the exact executor answers everything, so that no answer can differ."""
        return self.precision == EXACT and not any(ramp.threshold > 0 for ramp in self.ramps)

    @property
    def menu(self) -> dict[str, Plan]:
        """What requests of each tier run under, as a plan of its own."""
        return {tier.name: replace(self, ramps=tier.ramps, tiers=()) for tier in self.tiers}

    @property
    def content_hash(self) -> str:
        """SHA-256 (hex) of the canonical content; equal plans have equal hashes on every machine."""
        return _content_hash(self)

    def name(self, service: str) -> str:
        """Name of the ``RampConfig`` of this plan: service name and a short content hash."""
        return f"{service}-{self.content_hash[:NAME_HASH_LENGTH]}"

    def to_mapping(self) -> dict[str, Any]:
        """JSON form, which is also the ``spec`` of a ``RampConfig``; decimals are strings."""
        return {
            "backboneDigest": self.backbone_digest,
            "rampSetDigest": self.ramp_set_digest,
            "ramps": _ramps_to_mapping(self.ramps),
            "precision": self.precision,
            "execution": self.execution,
            **(
                {"tiers": [{"name": t.name, "ramps": _ramps_to_mapping(t.ramps)} for t in self.tiers]}
                if self.tiers
                else {}
            ),
        }

    @classmethod
    def from_mapping(cls, value: dict[str, Any]) -> Plan:
        """Parse :meth:`to_mapping`.

        Raises
        ------
        InvalidArgumentError
            A field is missing, unknown or outside its range; the message names it.
        """
        known = {"backboneDigest", "rampSetDigest", "ramps", "precision", "execution", "tiers"}
        if not isinstance(value, dict) or set(value) - known or not {"backboneDigest", "rampSetDigest"} <= set(value):
            raise InvalidArgumentError(f"a plan has the fields {sorted(known)}, both digests required; got {value!r}")
        precision, execution = check_precision(value.get("precision", EXACT)), value.get("execution", "Auto")
        if execution not in ("Auto", "ResultsOnly", "ComputeSaving"):
            raise InvalidArgumentError(f"execution {execution!r} is unknown; use Auto, ResultsOnly or ComputeSaving")
        ramps = tuple(_ramp_from_mapping(ramp) for ramp in value.get("ramps", ()))
        tiers = tuple(_tier_from_mapping(tier) for tier in value.get("tiers", ()))
        return cls(value["backboneDigest"], value["rampSetDigest"], ramps, precision, execution, tiers)


@lru_cache(maxsize=1024)  # one pass asks for that of the plan in force several times
def _content_hash(plan: Plan) -> str:
    return hashlib.sha256(canonical_json(plan.to_mapping())).hexdigest()


def _ramps_to_mapping(ramps: tuple[RampThreshold, ...]) -> list[dict[str, str]]:
    return [{"id": ramp.id, "threshold": format_threshold(ramp.threshold)} for ramp in ramps]


def _tier_from_mapping(value: Any) -> TierRamps:
    try:
        return TierRamps(str(value["name"]), tuple(_ramp_from_mapping(ramp) for ramp in value["ramps"]))
    except (KeyError, TypeError) as error:
        raise InvalidArgumentError(f"a tier has name and ramps; got {value!r}") from error


def _ramp_from_mapping(value: Any) -> RampThreshold:
    try:
        return RampThreshold(str(value["id"]), Decimal(str(value["threshold"])))
    except (KeyError, TypeError, InvalidOperation) as error:
        raise InvalidArgumentError(f"a ramp has id and threshold (a decimal string); got {value!r}") from error


def exits_off_plan(*, backbone_digest: str, ramp_set_digest: str) -> Plan:
    """The plan without ramps for a bundle."""
    return Plan(backbone_digest, ramp_set_digest)


def floor_threshold(value: float) -> Decimal:
    """Round down to the six decimals a plan stores. Downwards, because a lower threshold is the cautious side."""
    return min(Decimal(1), max(Decimal(0), Decimal(value).quantize(THRESHOLD_STEP, rounding=ROUND_FLOOR)))


def format_threshold(value: Decimal) -> str:
    """Shortest fixed-point text without exponent or trailing zeros: ``0.25``, ``0``, ``1``."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def canonical_json(value: Any) -> bytes:
    """The one byte form of a JSON value that is hashed and signed: sorted keys, no spaces, UTF-8, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
