"""Answers whose next tokens are computed in one pass are those that each gets alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story_bundles import prompt, prompts, write, write_story_bundle

from offramp_core.generation.drafts import Drafts
from offramp_core.generation.levels import Setting
from offramp_worker.engine.accounts.counters import Counters
from offramp_worker.engine.arms.leases import Arms
from offramp_worker.generate import load as load_module
from offramp_worker.generate.llama import bank as bank_module
from offramp_worker.generate.llama import engine as engine_module
from offramp_worker.generate.llama.bank import PLACES, Bank, computes_alike
from offramp_worker.generate.llama.decoder import Cache, Decoder
from offramp_worker.generate.llama.engine import LlamaEngine
from offramp_worker.generate.load import load_generation
from offramp_worker.generate.plan_target import off_runtime
from offramp_worker.generate.requests import Asked, Wanted
from offramp_worker.generate.routes import Dispatch
from offramp_worker.generate.seam import DecodingRoute, Loaded, NoRoomError, Sampling
from offramp_worker.generate.tickets import Ticket, TicketMaker

PLAIN, LIMIT = DecodingRoute(), 2**20
ROUTES = [
    PLAIN,
    DecodingRoute("int8"),
    DecodingRoute("int4"),
    DecodingRoute("fp32", "int8", 4),
    DecodingRoute("fp32", "ngram", 3),
]
SAMPLINGS = [Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stories") / "bundle"
    write_story_bundle(path)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[Loaded]:
    made = load_generation(folder, threads=1, cache_bytes=LIMIT * 8)
    yield made
    made.engine.close()


@pytest.fixture(scope="module")
def alone(loaded: Loaded) -> Callable[[int, int, DecodingRoute, Sampling], list[int]]:
    """An answer that has the engine for itself."""

    @cache
    def written(which: int, n: int, route: DecodingRoute, sampling: Sampling) -> list[int]:
        return write(loaded.engine, prompts(12)[which], n=n, route=route, sampling=sampling).ids

    return written


@pytest.fixture(scope="module")
def together(folder: Path) -> Iterator[Loaded]:
    """Whose answers are computed in one pass whatever this machine's kernels make of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "computes_alike", lambda _: True)
        made = load_generation(folder, threads=1, cache_bytes=LIMIT * 8)
    yield made
    made.engine.close()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each pass for several computed."""
    counted: list[int] = []
    run_each = Decoder.run_each

    def counting(decoder: Decoder, cache: Cache, tokens: Sequence[int], **fields: Any) -> Any:
        counted.append(len(tokens))
        return run_each(decoder, cache, tokens, **fields)

    monkeypatch.setattr(Decoder, "run_each", counting)
    return counted


def started(engine: Any, count: int, *, n: int = 12, read: bool = True) -> list[int]:
    """Plain answers that are being written, each with its first token."""
    numbers = [engine.start(words, max_tokens=n, sampling=Sampling(), route=PLAIN) for words in prompts(count)]
    if read:
        engine.step(numbers, prompt_tokens=64)
    return numbers


def finished(engine: Any, numbers: Sequence[int]) -> dict[int, list[int]]:
    """What is written from here on."""
    found: dict[int, list[int]] = {number: [] for number in numbers}
    left = list(numbers)
    while left:
        for one in engine.step(left, prompt_tokens=64):
            assert not one.error
            found[one.sequence] += [t.id for t in one.tokens]
            if one.ended:
                left.remove(one.sequence)
    return found


asked = st.tuples(
    st.integers(0, 11),  # which prompt
    st.integers(1, 12),  # tokens at most
    st.sampled_from(ROUTES),
    st.sampled_from(SAMPLINGS),
    st.integers(0, 6),  # the step in which it comes
    st.one_of(st.none(), st.integers(1, 6)),  # steps after which its client goes
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=st.lists(asked, min_size=2, max_size=11), skipped=st.sets(st.tuples(st.integers(0, 30), st.integers(0, 10))))
def test_any_mix_of_answers_gives_each_the_tokens_that_it_gets_alone(
    loaded: Loaded,
    alone: Callable[[int, int, DecodingRoute, Sampling], list[int]],
    mix: list[Any],
    skipped: set[tuple[int, int]],
) -> None:
    """They come, go, wait for a step and end at different times."""
    engine = loaded.engine
    wanted = [alone(*one[:4]) for one in mix]
    numbers: dict[int, int] = {}  # running ones
    answers: list[list[int]] = [[] for _ in mix]
    turns, step, ended = [0] * len(mix), 0, set[int]()
    while len(ended) < len(mix):
        for i, (which, n, route, sampling, comes, goes) in enumerate(mix):
            if comes == step:
                numbers[i] = engine.start(prompts(12)[which], max_tokens=n, sampling=sampling, route=route)
            if i in numbers and goes is not None and turns[i] >= goes:
                engine.cancel(numbers.pop(i))
                ended.add(i)
        some = [i for i in numbers if (step, i) not in skipped]
        if some:
            for i, one in zip(some, engine.step([numbers[i] for i in some], prompt_tokens=64), strict=True):
                assert not one.error
                answers[i] += [t.id for t in one.tokens]
                turns[i] += 1
                if one.ended:
                    ended.add(i)
                    del numbers[i]
        step += 1
    for (*_, goes), answer, whole in zip(mix, answers, wanted, strict=True):
        assert answer == whole[: len(answer)] and (goes is not None or answer == whole)
    assert engine.memory().used_bytes == 0


def test_the_next_tokens_of_several_answers_are_one_pass(together: Loaded, passes: list[int]) -> None:
    numbers = started(together.engine, 5)
    together.engine.step(numbers, prompt_tokens=64)
    assert passes == [5]
    together.engine.step(numbers[:1], prompt_tokens=64)
    assert passes == [5]
    for number in numbers:
        together.engine.cancel(number)


def test_more_answers_than_one_pass_takes_are_several_passes(
    loaded: Loaded, together: Loaded, passes: list[int]
) -> None:
    count = PLACES + 3
    assert finished(together.engine, started(together.engine, count))
    assert {PLACES, 3} <= set(passes)
    alone = [write(loaded.engine, words, n=12).ids for words in prompts(count)]
    rest = finished(loaded.engine, started(loaded.engine, count))
    assert list(rest.values()) == [ids[1:] for ids in alone]


def test_an_answer_whose_client_goes_leaves_the_others_what_they_are(loaded: Loaded) -> None:
    engine = loaded.engine
    alone = [write(engine, words, n=12).ids for words in prompts(4)]
    for gone in range(4):
        numbers = started(engine, 4)
        engine.step(numbers, prompt_tokens=64)
        engine.cancel(numbers[gone])
        left = [n for i, n in enumerate(numbers) if i != gone]
        rest = finished(engine, left)
        assert [rest[n] for n in left] == [ids[2:] for i, ids in enumerate(alone) if i != gone]


def test_an_answer_that_fails_leaves_the_others_what_they_are(loaded: Loaded) -> None:
    engine = loaded.engine
    assert isinstance(engine, LlamaEngine)
    alone = [write(engine, words, n=12).ids for words in prompts(4)]
    numbers = started(engine, 4)
    engine.step(numbers, prompt_tokens=64)
    engine._sequences[numbers[1]].cache.values[...] = np.nan
    broken = engine.step(numbers, prompt_tokens=64)
    assert [bool(p.error) for p in broken] == [False, True, False, False]
    left = [numbers[0], numbers[2], numbers[3]]
    before = engine.memory().used_bytes
    engine.cancel(numbers[1])
    assert engine.memory().used_bytes == before > 0, "it gave its caches back when it broke"
    rest = finished(engine, left)
    assert [rest[n] for n in left] == [alone[i][3:] for i in (0, 2, 3)]


def test_where_a_pass_fails_each_answer_is_computed_alone(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [write(loaded.engine, words, n=12).ids for words in prompts(3)]

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the pass failed")

    monkeypatch.setattr(Decoder, "run_each", failing)
    numbers = started(loaded.engine, 3)
    assert list(finished(loaded.engine, numbers).values()) == [ids[1:] for ids in alone]


def test_kernels_that_compute_rows_otherwise_beside_others_compute_answers_alone(
    folder: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(loaded.engine, LlamaEngine)
    run_each, counted = Decoder.run_each, list[int]()

    def otherwise(decoder: Decoder, cache: Cache, tokens: Sequence[int], **fields: Any) -> Any:
        counted.append(len(tokens))
        return run_each(decoder, cache, tokens, **fields) + np.float32(1e-6 * (len(tokens) == 4))

    monkeypatch.setattr(Decoder, "run_each", otherwise)
    other = load_generation(folder, threads=1, cache_bytes=LIMIT)
    assert not computes_alike(loaded.engine._decoders["fp32"])
    counted.clear()
    numbers = started(other.engine, 4)
    assert finished(other.engine, numbers) and counted == []
    other.engine.close()
    monkeypatch.setattr(Decoder, "run_each", lambda _, __, tokens, **___: np.array(tokens)[:, np.newaxis])
    assert computes_alike(loaded.engine._decoders["fp32"])


def test_caches_of_answers_side_by_side_take_what_was_said_and_are_bounded(folder: Path) -> None:
    made = load_generation(folder, threads=1, cache_bytes=LIMIT)
    engine, each = made.engine, made.engine.cache_bytes(len(prompt()) + 100, route=PLAIN)
    fit = LIMIT // each
    numbers = [engine.start(prompt(), max_tokens=100, sampling=Sampling(), route=PLAIN) for _ in range(fit)]
    for _ in range(3):
        engine.step(numbers, prompt_tokens=64)
    assert engine.memory().used_bytes == fit * each and fit > 1
    with pytest.raises(NoRoomError):
        engine.start(prompt(), max_tokens=100, sampling=Sampling(), route=PLAIN)
    engine.cancel(numbers[0])
    assert engine.memory().used_bytes == (fit - 1) * each
    engine.start(prompt(), max_tokens=100, sampling=Sampling(), route=PLAIN)
    engine.close()


def test_where_no_bank_can_be_made_answers_are_computed_alone_and_one_line_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_module, "computes_alike", lambda _: True)
    made = load_generation(folder, threads=1, cache_bytes=LIMIT)
    wanted = [write(made.engine, words, n=12).ids for words in prompts(3)]

    def refused(*_: Any) -> Bank:
        raise MemoryError("no room")

    monkeypatch.setattr(bank_module, "Bank", refused)
    numbers = started(made.engine, 3, n=12)
    found = finished(made.engine, numbers)
    assert [found[number] for number in numbers] == [ids[1:] for ids in wanted]
    assert capsys.readouterr().err.count('"event":"bank-refused"') == 1
    made.engine.close()


def test_a_bank_gives_back_the_memory_of_whoever_leaves(loaded: Loaded) -> None:
    engine = loaded.engine
    assert isinstance(engine, LlamaEngine)
    numbers = started(engine, 3)
    members = [engine._sequences[n] for n in numbers]
    bank = Bank(engine._decoders["fp32"].architecture, 64)
    for one in members:
        bank.enter(one)
    last, newest = members[2].cache.values.copy(), members[2].length
    bank.leave(members[0])
    assert (bank.members, members[2].cache is bank.members[0].cache) == ([members[2], members[1]], True)
    assert (members[2].cache.values[..., :newest, :] == last[..., :newest, :]).all()
    assert not bank.values[:, :, 2].any()
    for number in numbers:
        engine.cancel(number)


def test_a_pass_is_shared_evenly_among_those_it_was_computed_for(
    together: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_each, now = Decoder.run_each, [0.0]

    def timed(*given: Any, **fields: Any) -> Any:
        now[0] += 6.0
        return run_each(*given, **fields)

    numbers = started(together.engine, 3)
    monkeypatch.setattr(Decoder, "run_each", timed)
    for module in (bank_module, engine_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert [p.seconds for p in together.engine.step(numbers, prompt_tokens=64)] == [2.0, 2.0, 2.0]
    for number in numbers:
        together.engine.cancel(number)


def six_tickets(loaded: Loaded, drafts: Drafts) -> tuple[Dispatch, list[Ticket]]:
    """Of a request that comes while one is computed, where four are at once."""
    off = off_runtime(loaded.bundle, Counters(), digest="", audit_rate=0.0)
    dispatch = Dispatch(Arms(off, uid="w", clock=lambda: 0.0), (), drafts=drafts)
    maker = TicketMaker(
        loaded, dispatch, may_audit=lambda *_: False, draw=lambda: 0.5, clock=lambda: 0.0, wall_clock=lambda: 0.0
    )
    asked = Asked(Wanted("completion", "", ()), (tuple(prompts(1)[0]),) * 6, (2,) * 6)
    return dispatch, maker.make(asked, reply=0, running=1, at_once=4)


def test_whether_an_answer_may_be_audited_is_asked_beside_those_of_its_request_that_were_drawn(
    together: Loaded,
) -> None:
    beside = list[tuple[int, int]]()

    def may_audit(tokens: int, drawn: int) -> bool:
        beside.append((tokens, drawn))
        return drawn < 2

    off = off_runtime(together.bundle, Counters(), digest="", audit_rate=1.0)
    dispatch = Dispatch(Arms(off, uid="w", clock=lambda: 0.0), ())
    maker = TicketMaker(
        together, dispatch, may_audit=may_audit, draw=lambda: 0.5, clock=lambda: 0.0, wall_clock=lambda: 0.0
    )
    asked = Asked(Wanted("completion", "", ()), (tuple(prompts(1)[0]),) * 4, (2,) * 4)
    tickets = maker.make(asked, reply=0, running=0, at_once=4)
    assert [ticket.audited for ticket in tickets] == [True, True, False, False]
    each = tickets[0].size
    assert beside == [(each, 0), (2 * each, 1), (3 * each, 2), (3 * each, 2)]


def test_drafts_are_chosen_by_how_many_answers_are_computed_and_not_by_how_many_wait(together: Loaded) -> None:
    _, tickets = six_tickets(together, Drafts((Setting("int8", 4),)))
    contexts = [ticket.assigned.context for ticket in tickets]
    assert [context.load for context in contexts if context is not None] == [4] * 6


def test_what_a_token_took_is_learned_about_the_answers_that_were_written_beside_it(together: Loaded) -> None:
    """Not about those that were computed when it was admitted."""
    drafts = Drafts((Setting("int8", 4),))
    dispatch, (first, *_) = six_tickets(together, drafts)
    known = set(drafts.serving())
    first.worked(1.0, among=1)  # a piece of its prompt
    first.prompt_left = 0
    for among in (2, 4, 7, 7):
        first.worked(0.25, among=among)
    assert (first.taken, first.busy, first.writing, first.beside) == (2.0, 2.0, 1.0, 5)
    dispatch.learn(first.assigned, seconds=first.writing, tokens=4, beside=first.beside)
    assert {context.load for context in set(drafts.serving()) - known} == {8}
