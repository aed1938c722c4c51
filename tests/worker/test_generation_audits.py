"""How many audits of answers a worker takes on, by what they take, on an engine whose time stands still otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from offramp_core.control.rollouts.rollout import AUDIT_WAIT_SECONDS
from offramp_core.generation.losses import AnswerLosses
from offramp_worker.generate.answers import GeneratedAnswer
from offramp_worker.generate.audits import MAX_DEBT_SECONDS, MAX_OWED, MAX_OWED_SECONDS, AuditDesk
from offramp_worker.generate.seam import REFERENCE, GenerationEngine, SequenceProgress, Token, Tokenizer
from offramp_worker.generate.tickets import Ticket

SHARE = 0.1


class Decoder:
    def add(self, token: int) -> str:
        return f"{token} "

    def finish(self) -> str:
        return ""


class Fixture:
    """A desk whose audits take ``each`` seconds, in two steps."""

    def __init__(self, each: float) -> None:
        self.each, self.now, self.steps = each, 0.0, 0
        bundle = SimpleNamespace(variants=[SimpleNamespace(name=REFERENCE)], end_tokens=(0,))
        engine = SimpleNamespace(bundle=bundle, start=lambda *_, **__: 1, step=self._compute, cancel=lambda _: None)
        self.desk = AuditDesk(
            cast(GenerationEngine, engine),
            cast(Tokenizer, SimpleNamespace(decoder=Decoder)),
            share=SHARE,
            compare=AnswerLosses(),
            judge=lambda _: None,
            lost=lambda _: None,
            spend=lambda *_: None,
            clock=lambda: self.now,
        )

    def _compute(self, sequences: Any, **_: Any) -> list[SequenceProgress]:
        self.now += self.each / 2
        self.steps += 1
        ended = self.steps % 2 == 0
        return [SequenceProgress(sequences[0], (Token(0 if ended else 1),), ended=ended)]

    def draw(self) -> None:
        """A request is drawn and answered by another variant."""
        answer = GeneratedAnswer(Decoder(), stops=(), end_tokens=(0,))
        answer.take((Token(1), Token(0)), ended=True)
        route = SimpleNamespace(variant="int8", draft="")
        ticket = SimpleNamespace(
            answer=answer, prompt=(1,), max_tokens=2, size=3, stops=(), asked={}, step=0, draw=0.0, audit_rate=1.0,
            assigned=SimpleNamespace(route=lambda _: route), wall_time=0.0, request_class="", source="", repeats=False,
        )  # fmt: skip
        self.desk.promise(ticket.size)
        assert self.desk.take_over(cast(Ticket, ticket), served=True)

    def fill(self) -> int:
        """Draw as many as there may be."""
        while self.desk.open_to(3):
            self.draw()
        return len(self.desk)

    def idle(self, audits: int) -> None:
        for _ in range(audits):
            self.draw()
        while self.desk.pending:
            self.desk.step()

    def busy(self) -> float:
        """The seconds until nothing is owed, beside requests that never end."""
        began = self.now
        while self.desk.pending:
            if self.desk.due:
                self.desk.step()
            else:
                self.now += 0.05
                self.desk.served(0.05)
        return self.now - began


@pytest.mark.parametrize("each", [0.03, 0.3, 2.0])
def test_what_a_worker_owes_can_be_done_in_time_beside_any_load(each: float) -> None:
    desk = Fixture(each)
    desk.idle(300)  # in time that nobody else wanted, of which some is owed
    assert desk.fill() > 1
    assert desk.busy() <= MAX_OWED_SECONDS + MAX_DEBT_SECONDS + each / SHARE < AUDIT_WAIT_SECONDS


def test_where_audits_are_fast_their_number_alone_bounds_them() -> None:
    desk = Fixture(0.02)
    desk.idle(1)
    assert desk.fill() == MAX_OWED


def test_one_audit_may_be_owed_however_long_it_takes() -> None:
    desk = Fixture(100.0)
    desk.idle(1)
    assert desk.fill() == 1


def test_the_first_audit_tells_while_it_runs_how_long_it_takes() -> None:
    desk = Fixture(10.0)
    desk.draw()
    assert desk.desk.open_to(3), "nothing is known of it"
    desk.desk.step()
    assert len(desk.desk) == 1 and not desk.desk.open_to(3)


def test_answers_of_one_request_are_owed_together() -> None:
    desk = Fixture(10.0)
    desk.idle(1)
    assert desk.desk.open_to(3) and not desk.desk.open_to(6, 1), "one may be owed, and not one beside it"
    assert Fixture(0.02).desk.open_to(3, MAX_OWED - 1) and not Fixture(0.02).desk.open_to(3, MAX_OWED)
