"""What a pass has decided so far. Each step takes a draft and returns the next one; nothing else is carried from step
to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from offramp_core.control.objects import (
    Config,
    ConfigStatus,
    Measured,
    RampSetStatus,
    Rollout,
    RolloutStatus,
    TuningStatus,
)
from offramp_core.control.seen import Seen
from offramp_core.control.snapshot import Event, NewConfig, Snapshot
from offramp_core.control.stable.watch import Watch
from offramp_core.control.tuning.training import bundle_identity
from offramp_core.plan import exits_off_plan
from offramp_core.protocol import Withdrawn
from offramp_core.reasons import MaybeReason


@dataclass(frozen=True, slots=True)
class Draft:
    """``configs`` are all plans as they are known by now, ``baseline`` is the one without exits, ``stable`` the one
    that serves, ``rollout`` the attempt under way.

    ``fell`` says why the stable plan was switched off in this pass, as (reason, message). Where that follows from
    evidence, which may be gone with the next pass, ``withdrawn`` says it to whoever reads the document.
    ``new_configs``, ``config_statuses`` and ``rollout_statuses`` are to be written.
    """

    configs: Mapping[str, Config]
    baseline: Config
    stable: Config
    tuning: TuningStatus
    ramp_sets: RampSetStatus
    rollout: Rollout | None = None
    measured: Measured = field(default_factory=Measured)
    watch: Watch = field(default_factory=Watch)
    fell: tuple[MaybeReason, str] = ("", "")
    withdrawn: tuple[Withdrawn, ...] = ()
    new_configs: tuple[NewConfig, ...] = ()
    config_statuses: Mapping[str, ConfigStatus] = field(default_factory=dict)
    rollout_statuses: Mapping[str, RolloutStatus] = field(default_factory=dict)
    events: tuple[Event, ...] = ()

    @property
    def measured_of_stable(self) -> Measured:
        """The figures of the plan that is stable now; it may have become so in this pass."""
        return self.measured.of(self.stable.plan)

    @property
    def canary(self) -> Config | None:
        """The plan of the attempt under way."""
        return self.configs[self.rollout.to_config] if self.rollout is not None else None

    def with_events(self, *events: Event) -> Draft:
        return replace(self, events=(*self.events, *events))

    def with_config(self, new: NewConfig, now: float) -> Draft:
        created = Config(new.name, new.plan, new.status, now)
        return replace(self, new_configs=(*self.new_configs, new), configs={**self.configs, new.name: created})

    def with_config_status(self, name: str, status: ConfigStatus) -> Draft:
        return replace(
            self,
            configs={**self.configs, name: replace(self.configs[name], status=status)},
            config_statuses={**self.config_statuses, name: status},
        )

    def with_rollout_status(self, name: str, status: RolloutStatus) -> Draft:
        return replace(self, rollout_statuses={**self.rollout_statuses, name: status})


def begun(seen: Seen, events: tuple[Event, ...]) -> Draft:
    """As things are stored, and with a plan without exits."""
    service, served = seen.service, seen.served
    plan = exits_off_plan(backbone_digest=served.backbone_digest, ramp_set_digest=served.ramp_set_digest)
    name = plan.name(service.name)
    new = NewConfig(name, plan, ConfigStatus("Baseline", "Certified", message=seen.spec.off))
    baseline = seen.snapshot.gathered.configs.get(name)
    made = Config(name, plan, new.status, seen.now) if baseline is None else baseline
    configs = {**seen.snapshot.gathered.configs, name: made}
    return Draft(
        configs=configs,
        baseline=made,
        stable=configs.get(service.status.stable_config, made),
        tuning=service.status.tuning,
        ramp_sets=_sets_of(service.status.ramp_sets, (served.backbone_digest, served.ramp_set_digest)),
        new_configs=(new,) if baseline is None else (),
        events=events,
    )


def as_decided(seen: Seen, draft: Draft) -> Snapshot:
    """What was seen, with what this pass has decided so far: an attempt that ends in it has ended."""
    statuses, gathered = draft.rollout_statuses, seen.snapshot.gathered
    rollouts = tuple(replace(r, status=statuses.get(r.name, r.status)) for r in gathered.rollouts)
    return replace(
        seen.snapshot,
        gathered=replace(gathered, configs=draft.configs, rollouts=rollouts),
        observed=replace(seen.snapshot.observed, records=seen.records(draft.ramp_sets)),
    )


def _sets_of(known: RampSetStatus, bundle: tuple[str, str]) -> RampSetStatus:
    """What is known of sets besides the bundle's own; those of another bundle are none of this one's."""
    return known if known.bundle in ("", bundle_identity(*bundle)) else RampSetStatus()
