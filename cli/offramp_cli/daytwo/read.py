"""Commands that only look: get, status, why, history, diff, top."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from offramp_cli.daytwo.session import NO, TIMED_OUT, OneService, ServiceName, Session, day_two, formatted, print_lines
from offramp_cli.show.diff import side_by_side
from offramp_cli.show.status import health_lines
from offramp_cli.show.tables import history_data, history_lines, top_data, top_lines
from offramp_cli.show.tree import get_data, get_lines
from offramp_cli.show.why import why_lines
from offramp_cli.source.source import SourceError
from offramp_core.control.objects import Config, Rollout
from offramp_core.control.spec import parse_duration
from offramp_operator.explain.family import Family
from offramp_operator.explain.health import health, health_data
from offramp_operator.explain.plans import comparison
from offramp_operator.explain.why import why_data

POLL_SECONDS = 2.0
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Show it again whenever it changes, until Ctrl-C.")]


@day_two
def get(session: Session, name: ServiceName = None, *, watch: WatchOption = False) -> None:
    """Show services as trees: the plan that serves, the rollout under way, tuning and workers.

    Examples:

      offramp get

      kubectl offramp get digits -n vision --watch

      offramp get digits -o wide
    """

    def lines() -> list[Text]:
        found = session.families(name)
        if not found:
            return [Text(f"no EarlyExitService in {session.source.where}; `kubectl apply` one, or `offramp up FILE`")]
        return get_lines(found, time.time(), wide=session.wide, namespaces=session.choice.all_namespaces)

    _show_or_watch(session, watch, lines, lambda: get_data(session.families(name)))


@day_two
def top(session: Session, name: ServiceName = None, *, watch: WatchOption = False) -> None:
    """Show every service's latency, agreement, exits, savings and labels.

    Examples:

      offramp top --watch

      kubectl offramp top -A -o wide
    """

    def lines() -> list[Text]:
        return top_lines(session.families(name), wide=session.wide, namespaces=session.choice.all_namespaces)

    _show_or_watch(session, watch, lines, lambda: top_data(session.families(name)))


@day_two
def status(
    session: Session,
    name: ServiceName = None,
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is healthy.")] = False,
    timeout: Annotated[str, typer.Option("--timeout", help="How long to wait, such as 90s or 10m.")] = "5m",
) -> None:
    """Say whether a service is healthy: serving as its newest spec asks, inside its budget and its latency objective.

    Exit code 0: healthy. 1: degraded, or not there yet without --wait. 2: still not healthy after --timeout. 3: no
    answer, for example no cluster.

    Examples:

      offramp status digits

      kubectl apply -f digits.yaml && kubectl offramp status digits --wait --timeout 10m
    """
    deadline = time.monotonic() + parse_duration(timeout, "--timeout")
    while True:
        family = session.family(name)
        found = health(family)
        if not wait or found.verdict == "Healthy" or found.final or time.monotonic() >= deadline:
            break
        time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
    session.show(lambda: health_lines(family, time.time()), lambda: health_data(family))
    if found.verdict != "Healthy":
        raise typer.Exit(TIMED_OUT if wait and not found.final else NO)


@day_two
def why(
    session: Session,
    name: ServiceName = None,
    rollout: Annotated[
        str | None, typer.Argument(metavar="ROLLOUT", help="A RampRollout; by default the newest.")
    ] = None,
    *,
    watch: WatchOption = False,
) -> None:
    """Explain which plan serves and why, every gate of a rollout with its evidence, and what the tuner waits for and
    how long.

    Examples:

      offramp why digits

      kubectl offramp why digits digits-3 -o json
    """

    def read() -> tuple[Family, Rollout | None]:
        family = session.family(name)
        return family, find_rollout(family, rollout)

    _show_or_watch(session, watch, lambda: why_lines(*read(), time.time()), lambda: why_data(*read(), time.time()))


@day_two
def history(session: Session, name: ServiceName = None) -> None:
    """List a service's rollouts, newest first, with verdicts and evidence.

    Examples:

      offramp history digits

      kubectl offramp history digits -o wide
    """
    family = session.family(name)
    session.show(lambda: history_lines(family, session.now, wide=session.wide), lambda: history_data(family))


@day_two
def diff(
    session: Session,
    a: OneService,
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="The other one; without it, what may become stable next.")
    ] = None,
) -> None:
    """Put two plans side by side: thresholds, precision, digests, certificates. A and B are RampConfigs or services.

    Exit code 0: they are the same plan. 1: they differ. 3: no answer, for example no cluster.

    Examples:

      offramp diff digits

      kubectl offramp diff digits-5b2c7a90de digits-77aa01fe34 -o json
    """
    families = session.families(None)
    first = find_plan(families, a, session.source.where)
    if b is not None:
        second = find_plan(families, b, session.source.where)
    else:
        candidate = next((f.candidate for f in families if f.name == a), None)
        if candidate is None:
            raise SourceError(f"{a} has no canary and no recommendation to compare with; name a second RampConfig")
        second = candidate
    session.show(lambda: side_by_side(first, second), lambda: comparison(first, second))
    if first.plan != second.plan:
        raise typer.Exit(NO)


def find_rollout(family: Family, name: str | None) -> Rollout | None:
    """The named rollout, else the newest. Raises :class:`SourceError` for an unknown name."""
    if name is None:
        return family.newest
    found = next((r for r in family.rollouts if r.name == name), None)
    if found is None:
        there = ", ".join(r.name for r in reversed(family.rollouts)) or "none"
        raise SourceError(f"{family.name} has no rollout {name!r}; there is {there}")
    return found


def find_plan(families: Sequence[Family], name: str, where: str) -> Config:
    """The stable plan of a service of that name, else the RampConfig. Raises :class:`SourceError` where there is
    neither."""
    for family in families:
        if family.name == name:
            if family.stable is None:
                raise SourceError(f"{name} serves no plan yet: {family.service.status.message}")
            return family.stable
    configs = {config.name: config for family in families for config in family.configs.values()}
    if name not in configs:
        there = ", ".join([*(f.name for f in families), *configs][:20]) or "none"
        raise SourceError(f"no service and no RampConfig {name!r} in {where}; there is {there}")
    return configs[name]


def _show_or_watch(session: Session, watch: bool, lines: Callable[[], Sequence[Text]], data: Callable[[], Any]) -> None:
    if not watch:
        session.show(lines, data)
        return
    if session.output in ("json", "yaml") or not sys.stdout.isatty():
        _watch_plain(session, lines, data)
    with Live(console=Console(highlight=False), screen=False, auto_refresh=False) as live:
        while True:
            live.update(Group(*lines()), refresh=True)
            time.sleep(POLL_SECONDS)


def _watch_plain(session: Session, lines: Callable[[], Sequence[Text]], data: Callable[[], Any]) -> None:
    """Into a pipe only what changed is written, a document or a screen at a time; ages alone are no change."""
    before: Any = None
    while True:
        machine = session.output in ("json", "yaml")
        now = data()
        if now != before:
            if machine:
                print(formatted(now, str(session.output)), end="---\n" if session.output == "yaml" else "", flush=True)
            else:
                print_lines([*lines(), Text()])
                sys.stdout.flush()
        before = now
        time.sleep(POLL_SECONDS)
