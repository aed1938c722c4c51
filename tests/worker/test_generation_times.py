"""The times of generated answers on a real worker: what is counted of them, who is turned away for them, and how many
answers are written side by side to keep them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import stories
from generation import ONCE, GenerationServer, with_settings
from processes import eventually

from offramp_core.generation.admission import AdmissionLimits, GenerationPace
from offramp_core.generation.losses import AnswerLosses
from offramp_core.sketch import SecondsSketch
from offramp_worker.generate.audits import AuditDesk
from offramp_worker.generate.line import Line
from offramp_worker.generate.seam import DecodingRoute, SequenceProgress, Token, VariantSpec

pytestmark = pytest.mark.slow

STEP_SECONDS = 0.02  # of one answer in one step; several take as many times as long


class Slow(stories.StoriesEngine):
    """Answers are computed one after the other, each for a known time at least; ``most`` is how many ever were in one
    step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.most = 0

    def step(self, sequences: Any, *, prompt_tokens: int) -> Any:
        self.most = max(self.most, len(sequences))
        time.sleep(STEP_SECONDS * len(sequences))
        return super().step(sequences, prompt_tokens=prompt_tokens)


@contextmanager
def a_long_answer(server: GenerationServer) -> Iterator[None]:
    """While an answer is being written that takes seconds, of which some tokens are there."""
    begun, stop = threading.Event(), threading.Event()

    def read() -> None:
        with server.openai.completions.create(
            model="stories", prompt=ONCE, max_tokens=400, temperature=0, stream=True
        ) as stream:
            for i, _ in enumerate(stream):
                if i == 5:
                    begun.set()
                if stop.is_set():
                    break

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


def test_the_control_plane_is_told_when_first_tokens_came_and_how_far_apart_the_others() -> None:
    with GenerationServer(engine=Slow()) as server:
        for n in (1, 8, 8):
            assert server.complete(max_tokens=n).status_code == 200
        server.until_idle()
        (counts,) = server.worker.observations(after=0, now=0.0).counts
    first, each = (SecondsSketch({int(i): n for i, n in h.items()}) for h in (counts.first_token, counts.per_token))
    assert (counts.requests, first.n, each.n) == (3, 3, 2), "an answer of one token has no time between tokens"
    shortest, whole = each.quantile(0.0), SecondsSketch({int(i): n for i, n in counts.latency.items()}).quantile(1.0)
    assert shortest is not None and whole is not None and STEP_SECONDS * 0.98 <= shortest < whole


def test_a_request_whose_first_token_would_come_too_late_is_told_when_to_come_again() -> None:
    patient = with_settings(running=1, route="fp32")
    with GenerationServer(engine=Slow(), generation=patient) as server, a_long_answer(server):
        assert server.worker.desk is not None
        load = server.worker.desk.load
        assert load.wait_seconds > 1.0, "the one that runs has hundreds of tokens to go"
    hurried = with_settings(running=1, route="fp32", first_token_seconds=1.0)
    with GenerationServer(engine=Slow(), generation=hurried) as server:
        with a_long_answer(server):
            reply = server.complete(max_tokens=4)
            assert reply.status_code == 429, reply.text
            assert 1 <= int(reply.headers["retry-after"]) <= 60
            assert "too close to the objective of 1 s" in reply.json()["error"]["message"]
            assert server.metric("refused_total", reason="first_token") == 1
        server.until_idle()
        assert server.complete(max_tokens=4).status_code == 200, "nobody is before it"


def test_a_request_that_finds_the_memory_of_caches_full_waits_or_hears_when_to_come_again() -> None:
    engine = Slow(cache_bytes=420 * Slow().bundle.cache_bytes_per_token)  # one of the long answers, and little more
    with GenerationServer(engine=engine, generation=with_settings(route="fp32", patience_seconds=1.0)) as server:
        too_large = server.complete(max_tokens=450)
        assert too_large.status_code == 400 and too_large.json()["error"]["param"] == "max_tokens"
        assert "OFFRAMP_CACHE_MIB" in too_large.json()["error"]["message"], "no waiting makes room for it"
        with a_long_answer(server):
            assert server.complete(max_tokens=4).status_code == 200, "what fits beside it is written beside it"
            reply = server.complete(max_tokens=40)
            assert reply.status_code == 429, reply.text
            assert 1 <= int(reply.headers["retry-after"]) <= 60
            assert reply.json()["error"]["code"] == "caches" and reply.json()["error"]["type"] == "rate_limit_error"
            assert "room for its keys and values beside those of other answers" in reply.json()["error"]["message"]
            assert server.metric("refused_total", reason="caches") == 1
            assert server.complete(max_tokens=450).status_code == 400, "no waiting makes room for it now, either"
    with (
        GenerationServer(engine=engine, generation=with_settings(route="fp32")) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        with a_long_answer(server):
            waits = pool.submit(server.complete, max_tokens=40)
            desk = server.worker.desk
            assert desk is not None
            eventually(lambda: desk.load.waiting == 1, what="a patient request that waits")
        assert waits.result(60).status_code == 200, "the long answer's client has gone, and its room is free"


def reader(left: int, *, max_tokens: int = 50, cache_bytes: int = 0) -> Any:
    """What a line looks at of a ticket with so much left of its prompt."""
    answer = SimpleNamespace(tokens=[])
    return SimpleNamespace(prompt_left=left, max_tokens=max_tokens, answer=answer, cache_bytes=cache_bytes, passed=0)


def test_prompts_that_are_read_first_are_waited_for_and_longer_ones_are_not() -> None:
    line = Line(AdmissionLimits(running=4, first_token_seconds=10.0))
    line.pace = GenerationPace(reading=0.01, writing=0.05)
    read = [reader(n) for n in (100, 400, 2000)]
    line.running.extend(read)
    load = line.load(500)
    # Half of the engine reads: 100 and 400 tokens of others, then 500 of its own.
    assert (load.wait_seconds, load.reading_seconds) == (pytest.approx(10.0), pytest.approx(10.0))
    assert line.load(50).wait_seconds == 0.0, "a short one passes them all"
    line.running.append(reader(0, max_tokens=10))
    assert line.load(500).wait_seconds == pytest.approx(4 * 10 * 0.05), "until the shortest of four has ended"


def test_who_waits_for_answers_that_have_yet_to_begin_waits_for_its_turn_and_not_for_memory() -> None:
    line = Line(AdmissionLimits(running=4))
    line.pace = GenerationPace(writing=0.1)
    line.waiting.extend(reader(0) for _ in range(4))
    load = line.load(own_bytes=100, free_bytes=1000)
    assert load.wait_seconds == pytest.approx(4 * 50 * 0.1) and not load.caches_full


def test_who_finds_the_memory_with_an_audit_waits_for_what_it_has_left() -> None:
    def step(*_: Any, **__: Any) -> list[SequenceProgress]:
        return [SequenceProgress(1, tokens=(Token(5),) * 10)]

    engine: Any = SimpleNamespace(
        bundle=SimpleNamespace(variants=(VariantSpec("fp32", 1), VariantSpec("int8", 1)), end_tokens=()),
        cache_bytes=lambda tokens, route: 10 * tokens,
        start=lambda *_, **__: 1,
        step=step,
    )
    tokenizer: Any = SimpleNamespace(decoder=lambda: SimpleNamespace(add=str, finish=str))
    nothing: dict[str, Any] = dict.fromkeys(("judge", "lost", "spend"), lambda *_: None)
    audits = AuditDesk(engine, tokenizer, share=0.1, compare=AnswerLosses(), clock=time.monotonic, **nothing)
    answer = SimpleNamespace(tokens=[5] * 40, finish="length", text="5")
    ticket: Any = SimpleNamespace(
        **dict.fromkeys(("stops", "draw", "audit_rate", "wall_time", "request_class", "source", "repeats", "step")),
        prompt=(1, 2),
        size=42,
        max_tokens=40,
        asked={},
        answer=answer,
        assigned=SimpleNamespace(route=lambda _: DecodingRoute()),
    )
    line = Line(AdmissionLimits(running=4))
    line.pace = GenerationPace(writing=0.1)
    line.waiting.append(reader(0, cache_bytes=100))
    assert audits.take_over(ticket, served=True) and audits.under_way is None, "it has no room in the memory yet"
    assert audits.step()
    load = line.load(own_bytes=100, free_bytes=50, audit=audits.under_way)
    assert load.wait_seconds == pytest.approx((40 - 10) * 0.1) and load.caches_full


@pytest.mark.parametrize(("objective", "most"), [(None, 6), (2.5 * STEP_SECONDS, 2)])
def test_answers_wait_for_their_turn_where_more_of_them_would_miss_the_time_per_token(
    objective: float | None, most: int
) -> None:
    engine = Slow()
    with GenerationServer(engine=engine, generation=with_settings(route="fp32", token_seconds=objective)) as server:
        assert server.complete(max_tokens=20).status_code == 200  # by which the pace is known
        with ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(lambda _: server.complete(max_tokens=12), range(6)))
        assert [r.status_code for r in replies] == [200] * 6
        assert engine.most <= most
        assert objective is not None or engine.most > 2


def test_tokens_that_the_model_accepts_of_each_proposal_are_counted() -> None:
    with GenerationServer(generation=with_settings(route="fp32+ngram:3")) as server:
        assert server.complete("One day, one day, one day", max_tokens=40).status_code == 200
        server.until_idle()
        route = "fp32+ngram:3"
        accepted = server.metric("draft_tokens_total", route=route, result="accepted")
        assert server.metric("accepted_tokens_sum", route=route) == accepted
        eventually(lambda: server.metric("accepted_tokens_count", route=route) > 0, what="proposals")


def test_the_control_plane_is_told_by_which_route_tokens_were_written_and_what_of_drafts_was_accepted() -> None:
    with GenerationServer(generation=with_settings(route="fp32+ngram:3")) as server:
        replies = [server.complete("One day, one day, one day", max_tokens=40).json() for _ in range(3)]
        assert server.complete(max_tokens=9, parameters={"exit": "never"}).status_code == 200
        server.until_idle()
        routes = {route.route: route for route in server.worker.observations(after=0, now=0.0).routes}
        proposed = sum(
            server.metric("draft_tokens_total", route="fp32+ngram:3", result=r) for r in ("accepted", "refused")
        )
    assert routes.keys() == {"fp32", "fp32+ngram:3"}
    assert routes["fp32"].tokens == 8 and routes["fp32"].proposed == 0
    drafted = routes["fp32+ngram:3"]
    assert drafted.tokens == sum(r["usage"]["completion_tokens"] - 1 for r in replies)
    assert 0 < drafted.accepted <= drafted.proposed == proposed and drafted.seconds > 0
