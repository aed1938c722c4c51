"""What an answer of vLLM's takes of the engine: of one that batches, an answer's own time says little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from offramp_core.evidence.meter import HoldbackMeter
from offramp_core.generation.columns import VariantStep
from offramp_core.reasons import RequestOutcome
from offramp_worker.engine.arms.arms import Active, Runtime
from offramp_worker.generate.accounts import Accounts
from offramp_worker.generate.metrics import GenerationMetrics
from offramp_worker.generate.plan_target import off_runtime
from offramp_worker.generate.routes import Assigned
from offramp_worker.generate.seam import DecodingRoute, GenerationBundle, Sampling, Token, VariantSpec
from offramp_worker.generate.tickets import Ticket
from offramp_worker.generate.vllm import engine as module
from offramp_worker.generate.vllm.engine import VllmEngine

AT_ONCE, TOKENS = 8, 4
BUNDLE = GenerationBundle("tiny", "sha256:" + "0" * 64, 64, 16, (2,), (VariantSpec("fp32", 1, ""),))


class Stream:
    """An answer whose tokens come when the test says so."""

    def __init__(self, *_: object, **__: object) -> None:
        self.news: tuple[Token, ...] = ()
        self.written = 0

    @property
    def has_news(self) -> bool:
        return bool(self.news)

    @property
    def ended(self) -> bool:
        return self.written + len(self.news) == TOKENS

    def take(self) -> tuple[tuple[Token, ...], bool, str]:
        news, self.news = self.news, ()
        self.written += len(news)
        return news, self.ended, ""


class Simulated:
    """vLLM in simulated time: with n answers side by side a step takes ``step_seconds(n)``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_seconds: Callable[[int], float]) -> None:
        self.now, self.step_seconds, self.streams = 0.0, step_seconds, list[Stream]()
        monkeypatch.setattr(module, "AnswerStream", self._stream)
        process = SimpleNamespace(name="fp32", at=Path(), up=True, trouble="", take_drafts=lambda: (0, 0))
        self.engine = VllmEngine(
            BUNDLE, {"fp32": cast("Any", process)}, cache_bytes=2**20, running=AT_ONCE, clock=lambda: self.now
        )

    def _stream(self, *_: object, **__: object) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def write(self, n: int, *, times: float = 1.0) -> tuple[float, float]:
        """So many answers side by side, so many ``times`` slower than usual; the shares of the time that the engine
        was said to be busy, and that all of them took together."""
        began, busy, seconds, self.streams = self.now, 0.0, 0.0, []
        numbers = [
            self.engine.start([3, 4], max_tokens=TOKENS, sampling=Sampling(), route=DecodingRoute()) for _ in range(n)
        ]
        for _ in range(TOKENS):
            self.now += self.step_seconds(n) * times
            for stream in self.streams:
                stream.news = (Token(5),)
            for one in self.engine.step(numbers, prompt_tokens=64):
                busy, seconds = busy + one.busy, seconds + one.seconds
        return busy / (self.now - began), seconds / (self.now - began)


def test_a_full_engine_is_busy_for_the_time_that_passes_and_not_for_each_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm = Simulated(monkeypatch, lambda n: 0.02)
    assert vllm.write(AT_ONCE) == pytest.approx((1.0, AT_ONCE))


def test_before_anything_was_measured_one_answer_keeps_the_engine_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Simulated(monkeypatch, lambda n: 0.02).write(1) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(
    ("step_seconds", "least", "most"),
    [
        pytest.param(lambda n: 0.02, 1 / AT_ONCE, 0.25, id="a step takes as long for eight as for one"),
        pytest.param(lambda n: 0.02 * n, 0.99, 1.0, id="answers are computed one after the other"),
        pytest.param(lambda n: 0.01 + 0.01 * n, 0.5, 0.7, id="half of a step of one is its own"),
    ],
)
def test_few_answers_take_as_much_of_an_engine_as_it_would_need_for_them_were_it_full(
    monkeypatch: pytest.MonkeyPatch, step_seconds: Callable[[int], float], least: float, most: float
) -> None:
    vllm = Simulated(monkeypatch, step_seconds)
    for n in (1, 3, 8, 5, 2, 7, 4, 6):
        vllm.write(n)
    busy, seconds = vllm.write(1)
    assert least <= busy <= most
    assert seconds == pytest.approx(1.0), "what it took itself is told apart, for whoever compares answers"


def test_an_answer_that_nobody_has_collected_yet_takes_nothing_from_those_that_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An audit waits for its turn to be looked at, and vLLM has long ended with it."""
    vllm = Simulated(monkeypatch, lambda n: 0.02)
    vllm.engine.start([3, 4], max_tokens=TOKENS, sampling=Sampling(), route=DecodingRoute())
    vllm.streams[0].news = (Token(5),) * TOKENS
    vllm.engine.wake()
    vllm.engine.step([], prompt_tokens=64)
    assert vllm.write(1) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(
    ("step_seconds", "truth"),
    [
        pytest.param(lambda n: 0.02, 1 / AT_ONCE, id="a step takes as long for eight as for one"),
        pytest.param(lambda n: 0.02 * n, 1.0, id="answers are computed one after the other"),
    ],
)
def test_what_an_answer_takes_of_the_engine_is_not_forgotten_while_the_load_does_not_vary(
    monkeypatch: pytest.MonkeyPatch, step_seconds: Callable[[int], float], truth: float
) -> None:
    vllm = Simulated(monkeypatch, step_seconds)
    for n in (1, 8, 3, 6, 2) * 6:
        vllm.write(n)
    for times in (1.0, 3.0):  # the machine has become slower meanwhile: that is no matter of load
        for _ in range(160):
            busy, _ = vllm.write(1, times=times)
        assert busy == pytest.approx(truth, rel=0.05)


def test_an_engine_that_has_come_to_batch_is_seen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = Simulated(monkeypatch, lambda n: 0.02 * n)
    for n in (1, 8, 3, 6, 2) * 6:
        vllm.write(n)
    vllm.step_seconds = lambda n: 0.02
    for n in (1, 8, 3, 6, 2) * 6:
        vllm.write(n)
    assert vllm.write(1)[0] == pytest.approx(1 / AT_ONCE, rel=0.2)


@pytest.mark.parametrize("before", [(1, 2, 3, 2, 1, 2, 8, 2, 1) * 5, ()], ids=["amid others", "the first one"])
def test_an_answer_that_hangs_does_not_make_a_full_engine_look_idle(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, ...]
) -> None:
    vllm = Simulated(monkeypatch, lambda n: 0.02 * n)
    for n in before:
        vllm.write(n)
    vllm.write(1, times=1500)
    assert min(vllm.write(n)[0] for n in (2, 3, 3) * 20) > 0.9


@pytest.mark.parametrize(
    ("fast", "busy"),
    [
        pytest.param(0.18, 0.18, id="its process has had no varied load, the reference's has"),
        pytest.param(0.1, 0.1 / AT_ONCE, id="both have"),
    ],
)
def test_what_a_plan_saves_is_about_whole_times_whatever_is_known_of_how_the_engine_batches(
    fast: float, busy: float
) -> None:
    """The estimate is made for each process apart, and a fraction of it is no unit for answer times."""
    slow = 0.2
    accounts, meter = Accounts(GenerationMetrics()), HoldbackMeter(plan_hash="p", share=0.5)
    off = off_runtime(BUNDLE, accounts.counters, digest="", audit_rate=0.0)
    active = Active(off, stable=replace(off, meter=meter), holdback=replace(off, meter=meter))
    for i in range(600):
        held_back = i % 2 == 0
        seconds, of_engine = (slow, slow / AT_ONCE) if held_back else (fast, busy)
        runtime = cast("Runtime", active.holdback if held_back else active.stable)
        assigned = Assigned((VariantStep("fp32"),), DecodingRoute(), active, runtime, compared=True)
        ticket = SimpleNamespace(
            assigned=assigned, answer=SimpleNamespace(tokens=[5] * TOKENS), prompt=(3,), audited=False, step=0,
            proposed=0, accepted=0, admitted=1.0, began=1.0, first=1.0, last=1.0 + seconds, last_step=True,
            taken=seconds, writing=seconds, busy=of_engine,
        )  # fmt: skip
        accounts.ended(cast("Ticket", ticket), RequestOutcome.OK)
    counts = meter.counts()
    for time in (counts.answer_time, counts.engine_time):
        assert time.saved / counts.batches == pytest.approx(1 - fast / slow, abs=0.03)
