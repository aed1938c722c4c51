"""What earlier attempts are good for: plans of the rollback window come back, and what nothing refers to any more is
forgotten."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offramp_core.control.draft import Draft
from offramp_core.control.objects import Config, ConfigStatus, ServiceStatus
from offramp_core.control.rollouts.rollout import forbidden, is_certified
from offramp_core.control.seen import Seen
from offramp_core.tuning import OVERHEAD_SLACK

IDLE_CONFIGS_KEPT = 10


def promoted_lately(seen: Seen, draft: Draft, config: Config) -> str:
    """The rollout within the rollback window that promoted a plan, if the plan is still proven for what is asked and
    what comes in."""
    window, since = seen.spec.rollout.rollback_window, draft.tuning.records_since_at
    promoted = sorted(
        (r for r in seen.snapshot.gathered.rollouts if r.status.verdict == "Succeeded"), key=lambda r: r.number
    )
    mine = [r for r in promoted[len(promoted) - window if window else len(promoted) :] if r.to_config == config.name]
    proven = is_certified(config, seen.service, since=since) and config.status.rejections == 0
    if not mine or not proven or config.plan.exits_off or not _may_return(seen, draft, config):
        return ""
    return mine[-1].name if (mine[-1].status.finished_at or 0.0) >= (since or 0.0) else ""


def known_good(seen: Seen, draft: Draft) -> str:
    """A plan of the rollback window that could serve where exits are off: nothing new need be found and certified."""
    if not draft.stable.plan.exits_off:
        return ""
    lately = sorted(
        (r for r in seen.snapshot.gathered.rollouts if r.status.verdict == "Succeeded"), key=lambda r: -r.number
    )
    names = (r.to_config for r in lately if r.to_config in draft.configs)
    return next((name for name in names if promoted_lately(seen, draft, draft.configs[name])), "")


def config_statuses(seen: Seen, draft: Draft) -> Mapping[str, ConfigStatus]:
    """Statuses that differ from what is stored, with the states of stable and canary kept true."""
    statuses, stored, rollout = dict(draft.config_statuses), seen.snapshot.gathered.configs, draft.rollout
    for name, config in stored.items():
        status = statuses.get(name, config.status)
        if name == draft.stable.name and not config.plan.exits_off:
            status = replace(status, state="Stable")
        elif rollout is not None and name == rollout.to_config and rollout.status.phase != "Pending":
            status = replace(status, state="Canary")
        elif status.state in ("Stable", "Canary"):
            status = replace(status, state="Superseded")
        statuses[name] = status
    return {name: s for name, s in statuses.items() if name not in stored or s != stored[name].status}


def forgotten(seen: Seen, draft: Draft, status: ServiceStatus) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Configs that nothing refers to any more, and old rollouts; a config that is cooling down stays remembered."""
    policy, rollouts = seen.spec.rollout, seen.snapshot.gathered.rollouts
    finished = sorted((r for r in rollouts if r.status.finished), key=lambda r: r.number)
    promoted = [r.name for r in finished if r.status.verdict == "Succeeded"]
    window = set(promoted[-policy.rollback_window :] if policy.rollback_window else [])
    old = [r for r in finished[: -policy.history_limit] if r.name not in window]
    kept = [r for r in rollouts if r not in old]
    used = {status.stable_config, status.candidate_config, *(r.to_config for r in kept), *(r.from_config for r in kept)}
    if draft.rollout is not None:
        used.add(draft.rollout.to_config)
    written = {*draft.rollout_statuses, *draft.config_statuses, *(new.name for new in draft.new_configs)}
    idle = sorted(
        (c for c in seen.snapshot.gathered.configs.values() if c.name not in used), key=lambda c: c.created_at
    )
    stale = [
        c
        for c in idle
        if (c.status.rejected_until_at or 0.0) <= seen.now and c.status.source != "Baseline" and c.name not in written
    ]
    return (
        tuple(c.name for c in stale[: max(0, len(idle) - IDLE_CONFIGS_KEPT)]),
        tuple(r.name for r in old if r.name not in written),
    )


def _may_return(seen: Seen, draft: Draft, config: Config) -> bool:
    """Whether the spec would let a plan be found anew: that includes the limits that a stable plan does not fall
    for."""
    plan, spec, (ids, costs) = config.plan, seen.spec, seen.served.chain(config.plan.precision)
    if (
        not seen.fits(plan, draft.ramp_sets)
        or plan.ramp_set_digest != seen.working_set(draft.ramp_sets)
        or forbidden(config, seen.service)
        or not {r.id for r in plan.ramps} <= set(ids)
    ):
        return False
    overhead = costs.overhead([ids.index(ramp.id) for ramp in plan.ramps])
    within = overhead <= spec.max_overhead * (1 + OVERHEAD_SLACK) and len(plan.ramps) <= spec.max_active
    return within and plan.execution == spec.execution
