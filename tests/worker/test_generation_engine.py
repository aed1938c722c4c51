"""The engine of the Llama family on a real small model, against an independent implementation of the same model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stories
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from story_bundles import VARIANTS, checkpoint, prompt, prompts, write, write_story_bundle

from offramp_core.errors import InvalidArgumentError
from offramp_worker.generate.audits import TIE_MARGIN, equality
from offramp_worker.generate.llama import engine as engine_module
from offramp_worker.generate.llama import sampling as choosing
from offramp_worker.generate.llama.decoder import Cache, Decoder
from offramp_worker.generate.llama.drafts import NgramIndex
from offramp_worker.generate.load import load_generation
from offramp_worker.generate.seam import DecodingRoute, Loaded, NoRoomError, Sampling
from offramp_worker.prepare.generation.rounding import few_bits

LOSSLESS = [DecodingRoute("fp32", "int8", 4), DecodingRoute("fp32", "int4", 3), DecodingRoute("fp32", "ngram", 5)]
FEW, MANY = 12, 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stories") / "bundle"
    write_story_bundle(path)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[Loaded]:
    made = load_generation(folder, threads=1, cache_bytes=64 * 2**20)
    yield made
    made.engine.close()


@pytest.fixture
def computed(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many tokens each variant computed, those of prompts and of refused proposals included."""
    counted, run = Counter[str](), Decoder.run
    names = {id(decoder): variant for variant, decoder in loaded.engine._decoders.items()}

    def counting(decoder: Decoder, cache: Cache, tokens: Any, **fields: Any) -> Any:
        counted[names[id(decoder)]] += len(tokens)
        return run(decoder, cache, tokens, **fields)

    monkeypatch.setattr(Decoder, "run", counting)
    return counted


def name(route: DecodingRoute) -> str:
    return f"{route.draft}:{route.draft_tokens}"


def test_greedy_answers_are_those_of_an_independent_implementation(loaded: Loaded) -> None:
    for text in ("Once upon a time", "The dog"):
        assert write(loaded.engine, prompt(text), n=40).ids == stories.greedy(text, n=40)[0]


def test_the_tokenizer_divides_texts_as_the_model_was_trained_on(loaded: Loaded) -> None:
    for text in ("Once upon a time", "Tim's  dog, Max: ünï \n 😀"):
        assert loaded.tokenizer.encode(text) == stories.tokenizer().encode(text)


@pytest.mark.parametrize("route", LOSSLESS, ids=name)
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_verified_draft_changes_no_greedy_answer_beyond_ties(
    loaded: Loaded, route: DecodingRoute, count: int
) -> None:
    verdicts, accepted = [], 0
    for words in prompts(count):
        drafted = write(loaded.engine, words, route=route)
        verdicts.append(equality(drafted.ids, write(loaded.engine, words).tokens))
        accepted += drafted.accepted
    assert "different" not in verdicts
    assert verdicts.count("tie") <= count / 50
    assert accepted > count  # or nothing was tested


@pytest.mark.parametrize("route", [DecodingRoute(), *LOSSLESS], ids=name)
def test_a_prompt_read_in_pieces_of_any_size_gives_the_same_answer(loaded: Loaded, route: DecodingRoute) -> None:
    words = prompt("Once upon a time there was a boy named Tim. He had a big red ball and")
    whole = write(loaded.engine, words, piece=1000)
    assert all(
        write(loaded.engine, words, piece=piece, route=route).ids == whole.ids for piece in (1, 3, len(words) - 1)
    )


def test_sequences_that_are_written_side_by_side_do_not_touch_each_other(loaded: Loaded) -> None:
    engine, words = loaded.engine, prompts(6)
    routes = [DecodingRoute(), DecodingRoute("int4"), *LOSSLESS, DecodingRoute("int8")]
    alone = [write(engine, w, route=r).ids for w, r in zip(words, routes, strict=True)]
    numbers = [engine.start(w, max_tokens=64, sampling=Sampling(), route=r) for w, r in zip(words, routes, strict=True)]
    together: dict[int, list[int]] = {n: [] for n in numbers}
    left = list(numbers)
    while left:
        for one in engine.step(left, prompt_tokens=4):
            together[one.sequence] += [t.id for t in one.tokens]
            if one.ended:
                left.remove(one.sequence)
    assert list(together.values()) == alone


@pytest.mark.parametrize("variant", ["int8", "int4"])
def test_variants_of_fewer_bits_say_nearly_the_same(loaded: Loaded, variant: str) -> None:
    """Teacher-forced: each next token behind the same text."""
    agreed = total = 0
    for words in prompts(8):
        text = write(loaded.engine, words).ids
        for i in range(0, len(text), 4):
            again = write(loaded.engine, [*words, *text[:i]], n=1, route=DecodingRoute(variant)).ids
            agreed, total = agreed + (again == text[i : i + 1]), total + 1
    assert agreed / total >= (0.95 if variant == "int8" else 0.8)


# --- sampling -----------------------------------------------------------------------------------------


SAMPLED = Sampling(temperature=0.9, top_p=0.9, seed=11)


@pytest.mark.parametrize("route", [DecodingRoute(), *LOSSLESS], ids=name)
def test_the_same_seed_draws_the_same_answer_whoever_else_is_served(loaded: Loaded, route: DecodingRoute) -> None:
    engine = loaded.engine
    first = write(engine, prompt(), route=route, sampling=SAMPLED).ids
    other = engine.start(prompt("The dog"), max_tokens=200, sampling=SAMPLED, route=route)
    sequence = engine.start(prompt(), max_tokens=64, sampling=SAMPLED, route=route)
    again: list[int] = []
    while len(again) < len(first):
        progress = engine.step([other, sequence], prompt_tokens=64)
        again += [t.id for t in progress[1].tokens]
    engine.cancel(other)
    assert again == first
    assert write(engine, prompt(), route=route, sampling=replace(SAMPLED, seed=12)).ids != first


@pytest.mark.slow
@pytest.mark.parametrize("route", LOSSLESS, ids=name)
def test_a_draft_keeps_the_distribution_of_samples(loaded: Loaded, route: DecodingRoute) -> None:
    """The third token behind a prompt that the draft proposes to, over many seeds, against the chances of the model's
    own draws."""
    words, n = prompt("Once upon a time, there was a"), 1500
    counted = []
    for chosen in (DecodingRoute(), route):
        draws = [
            write(loaded.engine, words, n=3, route=chosen, sampling=Sampling(temperature=1.0, seed=s)).ids
            for s in range(n)
        ]
        counted.append(np.bincount([d[2] for d in draws if len(d) == 3], minlength=512))
    plain, drafted = counted
    common = np.argsort(-plain)[:12]
    table = np.array([[*c[common], c.sum() - c[common].sum()] for c in (plain, drafted)], dtype=float)
    expected = table.sum(axis=0) * table.sum(axis=1)[:, None] / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    assert statistic < 32.9  # the 99.9 % point of chi-square with 12 degrees of freedom


chances = st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4).filter(lambda x: sum(x) > 0.1)


@pytest.mark.slow
@settings(max_examples=25)
@given(p=chances, q=chances, seed=st.integers(0, 2**32 - 1))
def test_a_verified_token_is_drawn_as_the_model_draws_whatever_the_draft_says(
    p: list[float], q: list[float], seed: int
) -> None:
    model, draft = np.array(p) / sum(p), np.array(q) / sum(q)
    rng, n = np.random.default_rng(seed), 3000
    counts = np.zeros(4)
    for _ in range(n):
        counts[choosing.verified(model, choosing.drawn(draft, rng), draft, rng)[0]] += 1
    assert counts[model == 0].sum() == 0
    some = model * n >= 5
    if some.sum() > 1:
        expected = model[some] / model[some].sum() * counts[some].sum()
        assert chisquare(counts[some], expected).pvalue > 1e-6


def test_a_token_that_is_always_proposed_is_drawn_as_the_model_draws() -> None:
    model, rng = np.array([0.5, 0.3, 0.2, 0.0]), np.random.default_rng(5)
    for proposed in range(4):
        counts = np.bincount([choosing.verified(model, proposed, None, rng)[0] for _ in range(4000)], minlength=4)
        assert counts[3] == 0
        assert chisquare(counts[:3], model[:3] * 4000).pvalue > 1e-4


@given(st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=600), st.floats(0.05, 1.0))
def test_a_nucleus_is_the_smallest_set_of_likeliest_tokens_that_reaches_top_p(row: list[float], top_p: float) -> None:
    logits = np.array(row, dtype=np.float32)
    whole = choosing.chances(logits, Sampling(temperature=1.0))
    kept = np.flatnonzero(choosing.chances(logits, Sampling(temperature=1.0, top_p=top_p)))
    left = np.setdiff1d(np.arange(len(row)), kept)
    assert whole[kept].sum() >= top_p - 1e-9
    assert len(left) == 0 or whole[left].max() <= whole[kept].min()
    assert whole[kept].sum() - whole[kept].min() < top_p + 1e-9


def test_a_tie_goes_to_the_lowest_id() -> None:
    row = np.array([0.0, 3.0, 3.0, 1.0], dtype=np.float32)
    assert choosing.greedy(row) == (1, 0.0)
    assert choosing.best(row, 3) == [1, 2, 3]
    assert row.tolist() == [0.0, 3.0, 3.0, 1.0]


def test_logits_that_are_no_numbers_end_the_sequence_with_an_error() -> None:
    with pytest.raises(ArithmeticError):
        choosing.greedy(np.array([0.0, np.nan], dtype=np.float32))
    with pytest.raises(ArithmeticError):
        choosing.chances(np.array([np.inf, 0.0], dtype=np.float32), SAMPLED)


@pytest.mark.parametrize("route", [DecodingRoute(), *LOSSLESS], ids=name)
@pytest.mark.parametrize(
    "sampling", [Sampling(logprobs=True, top_logprobs=3), replace(SAMPLED, logprobs=True)], ids=["greedy", "drawn"]
)
def test_log_probabilities_are_the_models_own_at_temperature_1(
    loaded: Loaded, route: DecodingRoute, sampling: Sampling
) -> None:
    words = prompt()
    written = write(loaded.engine, words, n=24, route=route, sampling=sampling)
    w = stories.weights()
    cache = np.zeros((2, w.layers, 64, w.kv_heads * w.head), dtype=np.float32)
    text = [*words, *written.ids]
    rows = stories.Growing(w, DecodingRoute(), Sampling(), [], [], 0, cache).forward(text)[len(words) - 1 : -1]
    for token, row in zip(written.tokens, rows, strict=True):
        exact = row - row.max()
        exact = exact - np.log(np.exp(exact).sum())
        assert token.logprob == pytest.approx(exact[token.id], abs=1e-3)
        top = [i for i, _ in token.top]
        assert len(top) == sampling.top_logprobs
        assert [exact[i] for i in top] == pytest.approx(sorted(exact, reverse=True)[: len(top)], abs=1e-3)
        two = np.sort(row)[-2:]
        assert token.margin == pytest.approx(two[1] - two[0], abs=TIE_MARGIN)


def test_without_being_asked_no_log_probabilities_are_told(loaded: Loaded) -> None:
    token = write(loaded.engine, prompt(), n=1).tokens[0]
    assert math.isnan(token.logprob) and token.top == ()


# --- bounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [DecodingRoute(), *LOSSLESS], ids=name)
def test_an_answer_never_has_more_tokens_than_asked_for_and_ends_where_the_context_does(
    loaded: Loaded, route: DecodingRoute
) -> None:
    for n in (1, 2, 3, 7):
        assert len(write(loaded.engine, prompt(), n=n, route=route).ids) == n
    longest = [stories.BEGIN, *stories.tokenizer().encode("a big dog " * 200)][:509]
    written = write(loaded.engine, longest, n=50, route=route)
    assert len(written.ids) == 3 or written.ids[-1] in loaded.bundle.end_tokens


def test_caches_take_what_was_said_and_are_given_back(loaded: Loaded) -> None:
    engine = loaded.engine
    number = engine.start(prompt(), max_tokens=20, sampling=Sampling(), route=LOSSLESS[1])
    said = engine.cache_bytes(len(prompt()) + 20, route=LOSSLESS[1])
    assert engine.memory().used_bytes == said
    engine.cancel(number)
    engine.cancel(number)
    engine.cancel(12345)
    assert engine.memory().used_bytes == 0


def test_a_sequence_without_room_is_refused_until_others_have_ended(folder: Path) -> None:
    made = load_generation(folder, threads=1, cache_bytes=70 * 2560)
    first = made.engine.start(prompt(), max_tokens=40, sampling=Sampling(), route=DecodingRoute())
    with pytest.raises(NoRoomError, match="tokens"):
        made.engine.start(prompt(), max_tokens=40, sampling=Sampling(), route=DecodingRoute())
    made.engine.cancel(first)
    assert len(write(made.engine, prompt(), n=40).ids) == 40


def test_a_cancelled_sequence_computes_nothing_more(loaded: Loaded, computed: Counter[str]) -> None:
    engine = loaded.engine
    number = engine.start(prompt(), max_tokens=200, sampling=Sampling(), route=DecodingRoute())
    engine.step([number], prompt_tokens=64)
    before = computed.total()
    engine.cancel(number)
    with pytest.raises(KeyError):
        engine.step([number], prompt_tokens=64)
    assert computed.total() == before > 0


def test_each_sequence_is_told_its_own_part_of_a_steps_time(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    run, clock = Decoder.run, [0.0]

    def timed(decoder: Decoder, cache: Cache, tokens: Any, **fields: Any) -> Any:
        clock[0] += len(tokens)  # a second for each token
        return run(decoder, cache, tokens, **fields)

    monkeypatch.setattr(Decoder, "run", timed)
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    engine = loaded.engine
    plain, drafted = (
        engine.start(prompt("Once upon a time"), max_tokens=20, sampling=Sampling(), route=route)
        for route in (DecodingRoute("int8"), DecodingRoute("fp32", "int8", 4))
    )
    read = engine.step([plain, drafted], prompt_tokens=512)
    wrote = engine.step([plain, drafted], prompt_tokens=512)
    assert [p.seconds for p in read] == [len(prompt("Once upon a time"))] * 2
    assert wrote[0].seconds == 1 and wrote[1].seconds == 4 + 5, "four proposals, and five tokens verified at once"
    for number in (plain, drafted):
        engine.cancel(number)


def test_a_draft_computes_what_it_proposes_and_the_model_what_it_verifies(
    loaded: Loaded, computed: Counter[str]
) -> None:
    words = prompt()
    written = write(loaded.engine, words, n=30, route=LOSSLESS[0])
    runs = len(written.ids) - written.accepted  # each run of the model gives one token of its own
    assert computed == {"int8": written.proposed, "fp32": len(words) + (runs - 1) + written.proposed}
    assert 0 < written.accepted <= written.proposed


def test_what_fails_for_one_sequence_leaves_the_others_be(loaded: Loaded) -> None:
    engine = loaded.engine
    good = engine.start(prompt(), max_tokens=5, sampling=Sampling(), route=DecodingRoute())
    bad = engine.start(prompt(), max_tokens=5, sampling=Sampling(temperature=float("nan")), route=DecodingRoute())
    fine, broken = engine.step([good, bad], prompt_tokens=64)
    assert len(fine.tokens) == 1 and not fine.error
    assert broken.ended and broken.error
    engine.cancel(good)
    assert engine.memory().used_bytes == 0, "the broken one has given its caches back"


@pytest.mark.parametrize(
    ("route", "words", "n", "why"),
    [
        (DecodingRoute("int2"), [1], 5, "int2"),
        (DecodingRoute("fp32", "exit-4", 3), [1], 5, "exit-4"),
        (DecodingRoute("int4", "int8", 3), [1], 5, "int8"),
        (DecodingRoute(), [1, 512], 5, "512"),
        (DecodingRoute(), [-1], 5, "-1"),
        (DecodingRoute(), [1] * 512, 5, "context"),
        (DecodingRoute(), [], 5, "prompt"),
        (DecodingRoute(), [1], 0, "max_tokens"),
    ],
)
def test_what_the_bundle_does_not_have_is_refused(
    loaded: Loaded, route: DecodingRoute, words: list[int], n: int, why: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        loaded.engine.start(words, max_tokens=n, sampling=Sampling(), route=route)


def test_the_probe_passes_on_any_thread_while_sequences_run(loaded: Loaded) -> None:
    number = loaded.engine.start(prompt(), max_tokens=5, sampling=Sampling(), route=DecodingRoute())
    loaded.engine.step([number], prompt_tokens=64)
    loaded.engine.probe()
    loaded.engine.cancel(number)


def test_a_draft_reads_no_prompt_of_its_own(loaded: Loaded, computed: Counter[str]) -> None:
    """What it computes is what it proposes: the verifying variant's keys and values are its own too."""
    written = write(loaded.engine, prompt("Once upon a time there was a little boy who"), n=10, route=LOSSLESS[1])
    assert computed[LOSSLESS[1].draft] == written.proposed


def test_words_that_came_before_are_proposed_again() -> None:
    index = NgramIndex()
    index.add([1, 2, 3, 4, 1, 2])
    assert index.proposed(3) == [3, 4, 1]
    index.add([9])
    assert index.proposed(3) == []


def restored(parts: dict[str, np.ndarray[Any, Any]], bits: int, inputs: int) -> np.ndarray[Any, Any]:
    """The matrix that packed blocks stand for, as the definition of ``MatMulNBits`` reads them."""

    def unpacked(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return x if bits == 8 else np.stack([x & 15, x >> 4], axis=-1).reshape(*x.shape[:-1], -1)

    n, blocks, _ = parts["values"].shape
    zeros = unpacked(parts["zeros"].reshape(n, -1))[:, :blocks, None].astype(np.float32)
    whole = unpacked(parts["values"]).astype(np.float32) - zeros
    return (whole * parts["scales"].reshape(n, blocks, 1)).reshape(n, -1)[:, :inputs]


def test_rounded_matrices_are_as_near_as_their_bits_allow() -> None:
    model = checkpoint()
    for entry in VARIANTS[1:]:
        for key in ("layers.0.qkv", "layers.2.down", "head"):
            exact = model.matrices[key]
            plain = restored(few_bits(exact, entry.bits, shrinks=(1.0,)), entry.bits, exact.shape[1])
            searched = restored(few_bits(exact, entry.bits), entry.bits, exact.shape[1])
            error = np.sqrt(((searched - exact) ** 2).mean() / (exact**2).mean())
            assert error <= np.sqrt(((plain - exact) ** 2).mean() / (exact**2).mean())
            assert error < (0.008 if entry.bits == 8 else 0.11)


def test_a_cache_is_written_only_where_the_new_tokens_are(loaded: Loaded) -> None:
    decoder = loaded.engine._decoders["fp32"]  # type: ignore[attr-defined]
    cache = Cache.of(decoder.architecture, 16)
    cache.values[...] = 7.0
    decoder.run(cache, [1, 2, 3], start=4, rows=[])
    changed = (cache.values != 7.0).any(axis=(0, 1, 2, 3, 5))
    assert changed.tolist() == [4 <= i < 7 for i in range(16)]
