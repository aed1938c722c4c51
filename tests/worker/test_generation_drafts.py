"""What the desk learns of drafts: from answers that fail, are given up, are short, or are written beside others. On an
engine that says what its passes take; no time is measured."""

from __future__ import annotations

import random
from typing import Any

import pytest

from offramp_core.generation.admission import AdmissionLimits
from offramp_core.generation.drafts import Context, Drafts
from offramp_core.generation.levels import NONE, Setting
from offramp_worker.engine.arms.leases import Arms
from offramp_worker.generate.accounts import Accounts
from offramp_worker.generate.answers import Piece
from offramp_worker.generate.desk import DeskOptions, GenerationDesk
from offramp_worker.generate.metrics import GenerationMetrics
from offramp_worker.generate.plan_target import off_runtime
from offramp_worker.generate.requests import Asked, Wanted
from offramp_worker.generate.routes import Dispatch
from offramp_worker.generate.seam import CacheMemory, GenerationBundle, Loaded, SequenceProgress, Token, VariantSpec
from offramp_worker.generate.tickets import Ticket

INT4 = Setting("int4", 3)
PASS = {1: 66.5, 2: 81.4, 3: 91.0, 4: 100.0, 5: 106.0, 6: 112.0, 7: 118.0, 8: 124.8}  # milliseconds, by answers


class Engine:
    """Answers without a draft share a pass; one with a draft has passes of its own, of two tokens each. ``drafted`` is
    what a token of those takes, in milliseconds."""

    def __init__(self, drafted: float, *, fails: bool = False) -> None:
        variants = (VariantSpec("fp32", 1),)
        self.bundle = GenerationBundle("m", "sha256:" + "5" * 64, 4096, 512, (1,), variants, (), (), 1)
        self.drafted, self.fails = drafted, fails
        self.open: dict[int, Any] = {}
        self.seconds, self.number, self.random = 0.0, 0, random.Random(0)

    def cache_bytes(self, tokens: int, *, route: object) -> int:
        return 1

    def memory(self) -> CacheMemory:
        return CacheMemory(0, 10**9)

    def fault(self) -> str:
        return ""

    def available(self, variant: str) -> bool:
        return True

    def wake(self) -> None: ...

    def start(self, prompt: Any, *, max_tokens: int, sampling: object, route: Any) -> int:
        self.number += 1
        self.open[self.number] = [route, max_tokens, True]
        return self.number

    def step(self, sequences: list[int], *, prompt_tokens: int) -> list[SequenceProgress]:
        plain = [n for n in sequences if not self.open[n][0].draft and not self.open[n][2]]
        shared = self._took(PASS[len(plain)]) / len(plain) if plain else 0.0
        return [self._one(n, shared) for n in sequences]

    def _one(self, n: int, shared: float) -> SequenceProgress:
        route, left, reads = self.open[n]
        if route.draft and not reads and self.fails:
            return SequenceProgress(n, ended=True, error="the draft failed")
        written = min(2, left) if route.draft and not reads else 1
        seconds = self._took(20.0) if reads else self._took(self.drafted * written) if route.draft else shared
        self.open[n] = [route, left - written, False]
        tokens = (Token(7),) * written
        return SequenceProgress(n, tokens, 0, left == written, route.draft_tokens, written - 1, seconds=seconds)

    def _took(self, milliseconds: float) -> float:
        seconds = milliseconds / 1e3 * self.random.uniform(0.95, 1.05)
        self.seconds += seconds
        return seconds

    def cancel(self, n: int) -> None:
        self.open.pop(n, None)

    def probe(self) -> None: ...
    def close(self) -> None: ...


class _Decoder:
    def add(self, token: int) -> str:
        return "x"

    def finish(self) -> str:
        return ""


class _Tokenizer:
    def decoder(self) -> _Decoder:
        return _Decoder()


class Desk:
    """A desk without its thread, and clients that ask again once they have their answers."""

    def __init__(self, drafts: Drafts, engine: Engine, *, seed: int = 0) -> None:
        draw = random.Random(seed).random
        accounts = Accounts(GenerationMetrics())
        off = off_runtime(engine.bundle, accounts.counters, digest="", audit_rate=0.0)
        dispatch = Dispatch(Arms(off, uid="a", clock=lambda: 0.0), (), drafts=drafts, draw=draw)
        limits = AdmissionLimits(running=8, waiting=64, patience_seconds=1e9)
        self.engine, self.open, self.errors, self.drafted = engine, set[Ticket](), 0, 0
        loaded: Any = Loaded(engine.bundle, engine, _Tokenizer())  # type: ignore[arg-type]
        self.desk = GenerationDesk(
            loaded,
            accounts=accounts,
            dispatch=dispatch,
            deliver=self._delivered,
            clock=lambda: engine.seconds,
            draw=draw,
            options=DeskOptions(limits),
        )

    def _delivered(self, pieces: list[tuple[Ticket, Piece]]) -> None:
        for ticket, piece in pieces:
            if piece.last or piece.error:
                self.desk.taken(ticket)
                self.open.discard(ticket)
                self.errors += bool(piece.error)
                self.drafted += bool(ticket.assigned.reference.draft)

    def ask(self, answers: int = 1, *, tokens: int) -> list[Ticket]:
        tickets = self.desk.submit(Asked(Wanted("completion", "", ()), ((5, 5, 5),) * answers, (tokens,) * answers))
        self.open |= set(tickets)
        return tickets

    def round(self) -> None:
        with self.desk._changed:
            self.desk._let_go()
        self.desk._begin()
        self.desk._round()

    def serve(self, n: int, *, clients: int = 1, answers: int = 1, tokens: int = 12) -> float:
        """The engine's seconds for n requests."""
        began = self.engine.seconds
        while n or self.open:
            while n and len(self.open) < clients * answers:
                self.ask(answers, tokens=tokens)
                n -= 1
            self.round()
        return self.engine.seconds - began


def told(drafts: Drafts) -> set[str]:
    return {str(setting) for setting in drafts.serving().values()}


@pytest.mark.parametrize("seed", range(5))
def test_a_draft_whose_answers_fail_is_off_for_good_after_three_of_them(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    desk = Desk(Drafts((INT4,), {INT4: 0.66}), Engine(44.0, fails=True), seed=seed)
    desk.serve(3000, tokens=4)
    assert desk.errors == desk.drafted == 3
    assert '"draft-off"' in "".join(capsys.readouterr()), "and that is told"


def test_answers_that_fail_in_one_turn_count_as_one_failure(capsys: pytest.CaptureFixture[str]) -> None:
    drafts, engine = Drafts((INT4,), {INT4: 0.3}), Engine(20.0)
    desk = Desk(drafts, engine)
    desk.serve(400, clients=4)
    tickets = [ticket for _ in range(4) for ticket in desk.ask(tokens=100)]
    while any(ticket.reads for ticket in tickets):
        desk.round()
    assert sum(ticket.drafts for ticket in tickets) >= 3
    engine.fails = True
    desk.round()
    assert desk.errors >= 3
    assert drafts.settings == (INT4,) and '"draft-off"' not in "".join(capsys.readouterr())


@pytest.mark.parametrize("seed", range(5))
def test_clients_that_give_up_do_not_hide_a_slow_draft(seed: int) -> None:
    drafts, engine = Drafts((INT4,), {INT4: 0.66}), Engine(30.0)
    desk = Desk(drafts, engine, seed=seed)
    desk.serve(60)
    assert told(drafts) == {"int4:3"}
    engine.drafted = 200.0
    for _ in range(20):
        (ticket,) = desk.ask(tokens=12)
        while desk.open:
            desk.round()
            if ticket.writing > 1.5:  # twice what it takes without a draft
                desk.desk.cancel(ticket)
                desk.open.discard(ticket)
                desk.round()
    assert told(drafts) == {"none"}


@pytest.mark.parametrize("seed", range(5))
def test_answers_of_two_tokens_are_learned_about(seed: int) -> None:
    drafts, engine = Drafts((INT4,), {INT4: 0.66}), Engine(30.0)
    desk = Desk(drafts, engine, seed=seed)
    desk.serve(60)
    engine.drafted = 200.0
    desk.serve(20, tokens=2)
    assert told(drafts) == {"none"}


SIX = tuple(Setting(draft, n) for draft in ("int4", "int8", "ngram") for n in (2, 3))


@pytest.mark.parametrize("seed", range(5))
def test_two_clients_do_not_keep_each_other_s_drafts_on(seed: int) -> None:
    """An answer beside one with a draft has a pass for itself, which is slower than the draft and than two in one."""
    drafts = Drafts(SIX, dict.fromkeys(SIX, 0.69))
    desk, off = Desk(drafts, Engine(44.0), seed=seed), Desk(Drafts(()), Engine(44.0))
    desk.serve(100, clients=2)
    assert drafts.serving()[Context("", 2)] == NONE
    assert desk.serve(200, clients=2) < 1.03 * off.serve(200, clients=2)


@pytest.mark.parametrize("seed", range(5))
def test_two_clients_have_a_draft_that_pays_and_lose_it_when_it_does_not(seed: int) -> None:
    drafts, engine = Drafts((INT4,), {INT4: 0.45}), Engine(30.0)
    desk = Desk(drafts, engine, seed=seed)
    desk.serve(200, clients=2)
    assert "int4:3" in told(drafts)
    engine.drafted = 50.0
    desk.serve(60, clients=2)
    desk.drafted = 0
    desk.serve(100, clients=2)
    assert desk.drafted < 10


@pytest.mark.parametrize("seed", range(5))
def test_answers_of_one_request_are_decided_about_as_they_are_computed(seed: int) -> None:
    """Not the first as if it were alone."""
    drafts, engine = Drafts((INT4,), {INT4: 0.66}), Engine(44.0)
    desk, off = Desk(drafts, engine, seed=seed), Desk(Drafts(()), Engine(44.0))
    desk.serve(60)
    assert told(drafts) == {"int4:3"}
    desk.serve(10, answers=8)
    assert desk.serve(30, answers=8) < 1.05 * off.serve(30, answers=8)


def test_nothing_unknown_is_tried_again_while_a_trial_waits_in_line() -> None:
    drafts = Drafts((INT4,), {INT4: 0.7})
    desk = Desk(drafts, Engine(200.0))
    desk.serve(10)
    context = next(iter(drafts.serving()))
    chosen = [drafts.choose(context, draw=0.2, ahead=i) for i in range(64)]
    assert chosen.count(INT4) <= 7, "the line doubles from trial to trial"
