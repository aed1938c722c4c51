"""``export`` and ``pin``: thresholds that a person takes into Git. Neither writes anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from offramp_cli.daytwo.session import NO, OneService, Session, day_two, formatted
from offramp_cli.source.folder import FolderSource
from offramp_cli.source.source import RefusedError, SourceError
from offramp_cli.verify import load_held_out
from offramp_core.control.objects import Config
from offramp_core.control.spec import ServiceSpec, parse_spec
from offramp_core.control.tuning.tuner import PIN_RECORDS
from offramp_core.errors import InvalidSpecError
from offramp_core.evaluate import chain_of
from offramp_core.plan import Plan, format_threshold
from offramp_core.precision import EXACT
from offramp_core.records import Records
from offramp_core.tuning import PinCheck, check_pin
from offramp_operator.explain.family import Family
from offramp_operator.explain.plans import certificate, ramps
from offramp_operator.explain.words import duration, share
from offramp_operator.local.records import pool_file
from offramp_operator.shell.record_pool import RampSetKey

Patch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of a pin; ``refused`` when the operator would refuse it."""

    text: str
    refused: bool = False


@day_two
def export(
    session: Session,
    name: OneService,
    *,
    config: Annotated[
        str | None, typer.Option("--config", metavar="NAME", help="A RampConfig; by default the one that serves.")
    ] = None,
) -> None:
    """Print the plan that serves as a ramps.pin block, to commit to Git.

    Examples:

      kubectl offramp export digits > pin.yaml

      kubectl patch ees digits --type merge --patch-file pin.yaml
    """
    family = session.family(name)
    chosen = known_config(family, config)
    if chosen is None or chosen.plan.exits_off:
        plan = "is answered by the model alone" if family.service.spec.generates else "serves with exits off"
        raise RefusedError(f"{name} {plan}, so there is nothing to pin; `offramp why {name}` says why")
    patch = pin_patch(chosen.plan)
    _print(session, patch, [Finding(f"RampConfig {chosen.name}: {certificate(chosen) or 'uncertified'}")])


@day_two
def pin(
    session: Session,
    name: OneService,
    *,
    ramp: Annotated[
        list[str] | None,
        typer.Option(
            "--ramp", metavar="ID=THRESHOLD", help="Exit at this ramp below this uncertainty; may be repeated."
        ),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            help="Precision of the backbone that the ramps belong to, as the bundle names it: fp32, int8, ...",
        ),
    ] = EXACT,
    config: Annotated[
        str | None, typer.Option("--config", metavar="NAME", help="Take the thresholds of a RampConfig.")
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            "--records", metavar="FILE.npz", help="Recorded scores to check against, such as a bundle's records.npz."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the patch. Required: this command never writes.")
    ] = False,
) -> None:
    """Check your own thresholds against recorded evidence, and print the patch that pins them. Writes nothing.

    Exit code 0: no evidence against them. 1: they would be refused.

    Examples:

      offramp pin digits --ramp r04-grid=0.25 --dry-run

      kubectl offramp pin digits --config digits-5b2c7a90de --dry-run

      offramp pin digits --ramp r04-grid=0.3 --records bundle/records.npz --dry-run
    """
    if not dry_run:
        raise RefusedError(
            "a service's spec is yours and your Git's, so nothing here writes it; add --dry-run for the patch, then "
            "apply that"
        )
    family = session.family(name)
    patch = _asked(family, ramp or [], precision, config)
    spec = checked(family, patch)
    plan = pinned(spec, family)
    file = records or _recorded(session, family)
    held = None if file is None else load_held_out(file)
    findings = [*_known(family, plan, session.now), check(plan, spec, held)]
    _print(session, patch, findings)
    if any(finding.refused for finding in findings):
        raise typer.Exit(NO)


def pin_patch(plan: Plan) -> Patch:
    """The part of an EarlyExitService that pins a plan; valid as a merge patch."""
    listed = [{"id": r.id, "threshold": format_threshold(r.threshold)} for r in plan.ramps]
    digest = {"rampSetDigest": plan.ramp_set_digest} if plan.ramp_set_digest else {}
    return {"spec": {"ramps": {"mode": "Pinned", "pin": {**digest, "precision": plan.precision, "ramps": listed}}}}


def known_config(family: Family, name: str | None) -> Config | None:
    """The named RampConfig, else the stable one. Raises :class:`SourceError` for an unknown name."""
    if name is None:
        return family.stable
    if name not in family.configs:
        raise SourceError(f"{family.name} has no RampConfig {name!r}; there is {', '.join(family.configs) or 'none'}")
    return family.configs[name]


def _asked(family: Family, entries: Sequence[str], precision: str, config: str | None) -> Patch:
    """The pin as the command line says it."""
    if config is not None:
        if entries:
            raise RefusedError("--config and --ramp both say what to pin; give one of them")
        chosen = known_config(family, config)
        assert chosen is not None
        return pin_patch(chosen.plan)
    listed = []
    for entry in entries:
        ramp_id, separator, threshold = entry.rpartition("=")
        if not separator:
            raise RefusedError(f"--ramp {entry!r} must be ID=THRESHOLD, such as r04-grid=0.25")
        listed.append({"id": ramp_id, "threshold": threshold})
    digest = {"rampSetDigest": family.stable.plan.ramp_set_digest} if family.stable is not None else {}
    return {"spec": {"ramps": {"mode": "Pinned", "pin": {**digest, "precision": precision, "ramps": listed}}}}


def checked(family: Family, patch: Patch) -> ServiceSpec:
    """The service's spec with the patch in it, by the rules of the manifest.

    Raises
    ------
    RefusedError
        The patched manifest would be refused; the message names the field.
    """
    spec = family.manifests["service"]["spec"]
    try:
        return parse_spec({**spec, "ramps": {**(spec.get("ramps") or {}), **patch["spec"]["ramps"]}})
    except InvalidSpecError as error:
        raise RefusedError(str(error)) from error


def pinned(spec: ServiceSpec, family: Family) -> Plan:
    """The plan that the operator would make of the pin."""
    assert spec.pin is not None
    stable = family.stable
    backbone = stable.plan.backbone_digest if stable is not None else ""
    return Plan(backbone, spec.pin.ramp_set_digest or "", spec.pin.ramps, spec.pin.precision, spec.execution)


def check(plan: Plan, spec: ServiceSpec, records: Records | None) -> Finding:
    """What recorded requests say, by the test with which the operator judges pins."""
    if records is None:
        return Finding(
            "no recorded requests can be read here (--records FILE.npz gives some); the operator checks the pin "
            "against its own"
        )
    if not records.ramp_ids:
        return Finding("the records do not name their ramps (ramp_id), so the pin cannot be checked against them")
    if plan.precision not in (records.precision, *records.others):
        return Finding(
            f"nothing was recorded at {plan.precision}; the records have "
            f"{', '.join((records.precision, *records.others))}",
            refused=True,
        )
    known = chain_of(records, plan, records.ramp_ids)[1]
    unknown = [r.id for r in plan.ramps if r.id not in known]
    if unknown:
        return Finding(f"ramp {unknown[0]!r} is unknown; there is {', '.join(known)}", refused=True)
    recent = records.take(slice(-PIN_RECORDS, None))
    found = check_pin(recent, plan, records.ramp_ids, budget=spec.max_disagreement, alpha=1 - spec.rollout.confidence)
    if not isinstance(found, PinCheck):
        return Finding(f"{found.n} recorded requests are too few to say; about {found.needed} would do")
    text = f"on {found.n:,} recorded requests {found.words}; the budget is {share(spec.max_disagreement)}"
    refused = "it would be refused; lower the thresholds or raise maxDisagreement"
    return Finding(f"{text}: {refused if found.refused else 'it would go into its canary'}", found.refused)


def _known(family: Family, plan: Plan, now: float) -> list[Finding]:
    """What the cluster remembers of the same thresholds."""
    same = [
        c
        for c in family.configs.values()
        if (set(c.plan.ramps), c.plan.precision, c.plan.ramp_set_digest)
        == (set(plan.ramps), plan.precision, plan.ramp_set_digest)
    ]
    findings = []
    for config in same:
        text = f"RampConfig {config.name} has these thresholds: {config.status.state}"
        if (config.status.rejected_until_at or 0) > now:
            text += (
                f", cooling down for {duration((config.status.rejected_until_at or 0) - now)}: {config.status.message}"
            )
        findings.append(Finding(text + (f", {certificate(config)}" if config.status.certificates else "")))
    return findings or [
        Finding(
            f"{ramps(plan, family.service.spec)}: these thresholds have not been tried; they must earn acceptance in a "
            "canary"
        )
    ]


def _recorded(session: Session, family: Family) -> Path | None:
    """The embedded shell's own records of the ramp set that serves."""
    if not isinstance(session.source, FolderSource) or family.stable is None:
        return None
    plan = family.stable.plan
    path = pool_file(
        session.source.folder_of(family.name) / "records", RampSetKey(plan.backbone_digest, plan.ramp_set_digest)
    )
    return path if path.is_file() else None


def _print(session: Session, patch: Patch, findings: Sequence[Finding]) -> None:
    """YAML with what is known as comments, so that it can be piped as it is."""
    if session.output == "json":
        print(
            formatted({"patch": patch, "findings": [{"text": f.text, "refused": f.refused} for f in findings]}, "json"),
            end="",
        )
        return
    session.show(
        lambda: [Text(f"# {f.text}") for f in findings] + [Text(formatted(patch, "yaml").rstrip())], lambda: patch
    )
