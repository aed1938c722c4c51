"""What a core says, or does not say, holds nobody up at the edge and ends none of its threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import bundles
import numpy as np
import pytest
from cores import ScriptedCore, scalar_reply
from engines import new_engine
from processes import DEADLINE_SECONDS, eventually, plan_for

from offramp_core.edge_settings import EdgeSettings
from offramp_core.evidence.slow import parse_limits
from offramp_core.execution import Regrouping
from offramp_core.protocol import ArmPlan, PlanDocument
from offramp_core.uncertainty import exit_test
from offramp_worker.bundle.load import Bundle
from offramp_worker.edge import forwarding
from offramp_worker.edge import link as links
from offramp_worker.edge.forwarding import Edge, Forwarding
from offramp_worker.edge.link import Link
from offramp_worker.edge.wire import Reply
from offramp_worker.engine.arms.arms import Active, Runtime
from offramp_worker.engine.engine import Engine
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.queue.tickets import Ticket
from offramp_worker.metrics import Metrics

SOON = 0.05


@pytest.fixture
def core(bundle: Bundle) -> Iterator[ScriptedCore]:
    with ScriptedCore(bundle.manifest) as core:
        yield core


@pytest.fixture
def link(core: ScriptedCore, bundle: Bundle) -> Iterator[Link]:
    link = Link(EdgeSettings(core.url, uplink=1e6), bundle, metrics=Metrics())
    link.open()
    yield link
    core.over.set()
    link.close()


class Sent:
    """A request on its way, and what came back."""

    def __init__(self, link: Link, what: str, *, within: float = math.inf) -> None:
        self.back = threading.Event()
        self.reply: Reply | None = None
        link.send(what, "x", bundles.inputs(1), sent="Input", within=within, answered=self._answered)

    def _answered(self, reply: Reply | None) -> None:
        assert not self.back.is_set()  # once
        self.reply = reply
        self.back.set()

    def came_back(self) -> bool:
        return self.back.wait(DEADLINE_SECONDS)


# --- the link ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [ScriptedCore.HANGS, ScriptedCore.DRIPS])
def test_time_runs_out_behind_any_number_of_requests_that_wait_and_of_a_reply_that_drips(
    how: str, core: ScriptedCore, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "LONGEST_PATIENCE", 10 * DEADLINE_SECONDS)
    core.says["rows"] = how
    others = [Sent(link, "rows") for _ in range(2 * links.CONNECTIONS)]
    late = Sent(link, "rows", within=SOON)
    assert late.came_back() and late.reply is None
    assert not any(other.back.is_set() for other in others)
    assert not link.away


def test_a_reply_that_drips_is_late_like_none(core: ScriptedCore, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    core.says["rows"] = core.DRIPS
    assert Sent(link, "rows", within=SOON).came_back() and not link.away
    monkeypatch.setattr(links, "LONGEST_PATIENCE", SOON)
    assert Sent(link, "rows").came_back()
    assert "no answer within" in link.away


def test_a_reply_is_read_as_far_as_one_may_be_long(core: ScriptedCore, bundle: Bundle) -> None:
    core.says[""] = (200, bytes(2 * links.MEETING_BYTES))
    link = Link(EdgeSettings(core.url), bundle, metrics=Metrics())
    link.open()
    assert "larger than" in link.away
    core.says[""], core.says["rows"] = core.me, (200, bytes(2 * links.HEADER_BYTES))
    link.meet()
    sent = Sent(link, "rows")
    assert sent.came_back() and sent.reply is None
    assert "larger than" in link.away
    link.close()


def test_the_start_waits_for_a_core_that_drips_no_longer_than_for_one_that_hangs(
    core: ScriptedCore, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "LONGEST_PATIENCE", SOON)
    core.says[""] = core.DRIPS
    link = Link(EdgeSettings(core.url), bundle, metrics=Metrics())
    link.open()
    assert "does not say who it is" in link.away
    link.close()


def test_whatever_the_core_says_of_itself_it_is_asked_again(
    core: ScriptedCore, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "AGAIN_SECONDS", 0.001)
    monkeypatch.setattr(links, "MEASURE_SECONDS", 0.0)
    core.says[""] = (200, b'{"more":' + b"[" * 60_000)
    link.watch(lambda: None)
    eventually(lambda: link.away, what="that the core is not understood")
    core.says[""] = core.me
    eventually(lambda: not link.away, what="the core's return")


@pytest.mark.parametrize("status", [429, 503, 504])
@pytest.mark.parametrize("what", ["scores", "features/r02-linear"])
def test_a_queue_that_others_fill_rests_one_path_and_loses_no_core(
    what: str, status: int, core: ScriptedCore, link: Link
) -> None:
    kind = what.partition("/")[0]
    core.says[kind] = (status, b"{}")
    assert Sent(link, what).came_back()
    assert (link.away, link.takes_features) == ("", True)
    assert link.rests(kind) and link.rests("scores") != link.rests("features")


@pytest.mark.parametrize(("status", "lost"), [(429, False), (400, False), (409, True), (500, True), (503, True)])
def test_a_core_that_cannot_answer_rows_is_lost_and_a_full_one_is_not(
    status: int, lost: bool, core: ScriptedCore, link: Link
) -> None:
    core.says["rows"] = (status, b"{}")
    assert Sent(link, "rows").came_back()
    assert bool(link.away) == lost
    assert not link.rests("rows")


# --- the engine ----------------------------------------------------------------------------------------


@pytest.fixture
def done() -> list[Ticket]:
    return []


@pytest.fixture
def start(core: ScriptedCore, link: Link, bundle: Bundle, sessions: Sessions, done: list[Ticket]) -> Iterator[Any]:
    """Starts an engine of an edge with a plan that answers no row at its exit."""
    begun = []

    def start(**edge: Any) -> Engine:
        way = replace(Edge(link, "Input", "Refuse"), **edge)
        engine = new_engine(bundle, sessions, deliver=done.extend, edge=way)
        begun.append(engine)
        plan = plan_for(bundle.path, {"r02-linear": "0"})
        at = [ramp.id for ramp in bundle.ramps].index("r02-linear")
        stages, test = tuple(sessions.stages([at])), exit_test(0.0, bundle.quantiles[at])
        counter = engine.counters.open(epoch=1, arm="stable", plan_hash=plan.content_hash)
        seconds = [[0.001] * 64] * len(stages)
        stable = Runtime(plan, 1.0, counter, stages, {at: test}, Regrouping([[0.0]] * len(stages), [0.0]), seconds)
        document = PlanDocument("tiny", "service-1", 1, ArmPlan({}, 1.0), None, 0, "salt", 0.02)
        engine.renew_lease()
        engine.start()
        engine.activate(Active(engine.active.off, document, stable, None, parse_limits({}, {})))
        return engine

    yield start
    core.over.set()
    for engine in begun:
        engine.close()
        engine.join(0.1)


def asked(engine: Engine, done: list[Ticket], **parameters: Any) -> Ticket:
    ticket = engine.submit(bundles.inputs(1, seed=3), never_exit=False, **parameters)
    eventually(lambda: ticket in done, what="an answer")
    return ticket


def test_no_reply_ends_the_engine_and_its_audits_are_made_here(
    core: ScriptedCore, link: Link, bundle: Bundle, start: Any, done: list[Ticket]
) -> None:
    engine, row = start(), np.zeros((1, bundle.task.width), np.float32)
    header = b'{"outputs":[{"name":"logits","datatype":"FP32","shape":[1,%d]}]}' % bundle.task.width
    core.says |= {"rows": (200, header + row.tobytes()), "scores": scalar_reply("logits", "uncertainty", "prediction")}
    assert asked(engine, done).exits == ["final"]
    eventually(lambda: engine.ring.next == 1, what="the record of an audit")
    core.says["rows"] = scalar_reply("logits")
    assert "does not keep up" in asked(engine, done).unable
    assert engine.alive


def test_each_hand_in_that_fails_is_the_only_one(start: Any, link: Link) -> None:
    engine = start()
    came = threading.Event()
    for hand_in in (partial(np.zeros, -1), came.set):
        engine.desk.left()
        engine.desk.back(hand_in)
    assert came.wait(DEADLINE_SECONDS)
    assert engine.alive


def test_rows_whose_answer_breaks_get_an_error(
    core: ScriptedCore, bundle: Bundle, start: Any, done: list[Ticket], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    header = b'{"outputs":[{"name":"logits","datatype":"FP32","shape":[1,%d]}]}' % bundle.task.width
    core.says["rows"] = (200, header + bytes(4 * bundle.task.width))
    monkeypatch.setattr(engine._replies, "_task", None)
    assert "come again" in asked(engine, done).unable
    assert engine.alive


def test_a_batch_with_a_deadline_is_not_sent_whole(
    core: ScriptedCore, start: Any, done: list[Ticket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no exit could keep it while the core hangs."""
    monkeypatch.setattr(Forwarding, "_whole_is_sooner", lambda *_: True)
    monkeypatch.setattr(forwarding, "sent", lambda *_, **__: "Input")
    engine = start(residue="Auto")
    core.says["rows"] = core.HANGS
    ticket = asked(engine, done, deadline_seconds=SOON)
    assert (ticket.due, ticket.exits) == ([True], ["r02-linear"])


@pytest.mark.parametrize("breaks", [False, True])
def test_a_batch_that_was_sent_whole_in_vain_takes_the_exits_where_they_may_answer(
    breaks: bool, core: ScriptedCore, start: Any, done: list[Ticket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And counts for no plan; whatever happens then, it gets an answer or an error."""
    monkeypatch.setattr(Forwarding, "_whole_is_sooner", lambda *_: True)
    monkeypatch.setattr(forwarding, "sent", lambda *_, **__: "Input")
    engine = start(residue="Auto", offline="Answer")
    core.says["rows"] = (503, b"{}")
    if breaks:
        monkeypatch.setattr(engine.forwarding, "_run", lambda *_: iter([None]))
    ticket = asked(engine, done)
    if breaks:
        assert "is out of reach" in ticket.unable
    else:
        assert (ticket.offline, ticket.exits, ticket.audited) == ([True], ["r02-linear"], [False])
    assert all(not counts.requests for counts in engine.counters.snapshot() if counts.epoch == 1)
    assert engine.submit(bundles.inputs(1), never_exit=True) is not None
    eventually(lambda: len(done) == 2, what="that nothing may answer for the model")
    assert "out of reach" in done[-1].unable
