"""What an answer of vLLM's takes of the engine: of one that batches, an answer's own time says little."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from offramp_worker.generate.seam import DecodingRoute, GenerationBundle, Sampling, Token, VariantSpec
from offramp_worker.generate.vllm import engine as module
from offramp_worker.generate.vllm.engine import VllmEngine

AT_ONCE, TOKENS = 8, 4


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
        bundle = GenerationBundle("tiny", "sha256:0", 64, 16, (2,), (VariantSpec("fp32", 1, ""),))
        process = SimpleNamespace(name="fp32", at=Path(), up=True, trouble="", take_drafts=lambda: (0, 0))
        self.engine = VllmEngine(
            bundle, {"fp32": cast("Any", process)}, cache_bytes=2**20, running=AT_ONCE, clock=lambda: self.now
        )

    def _stream(self, *_: object, **__: object) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def write(self, n: int) -> tuple[float, float]:
        """So many answers side by side; the shares of the time that the engine was said to be busy, and that all of
        them took together."""
        began, busy, seconds, self.streams = self.now, 0.0, 0.0, []
        numbers = [
            self.engine.start([3, 4], max_tokens=TOKENS, sampling=Sampling(), route=DecodingRoute()) for _ in range(n)
        ]
        for _ in range(TOKENS):
            self.now += self.step_seconds(n)
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
