"""A bundle of stories260K with all variants and drafts, and ways to ask an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import stories

from offramp_worker.generate.llama.decoder import Decoder
from offramp_worker.generate.llama.manifest import GenerationManifest, GenerationProfile, VariantEntry
from offramp_worker.generate.seam import DecodingRoute, DraftSpec, GenerationEngine, Sampling, Token
from offramp_worker.prepare.generation.checkpoint import Checkpoint
from offramp_worker.prepare.generation.llama2c import read_llama2c
from offramp_worker.prepare.generation.writing import (
    EXACT,
    open_variant,
    probe_tensors,
    variant_tensors,
    write_common,
    write_rest,
    write_variant,
)

VARIANTS = (EXACT, VariantEntry("int8", 8, 8), VariantEntry("int4", 4, 4))
DRAFTS = (
    DraftSpec("int8", "variant", variants=("fp32",)),
    DraftSpec("int4", "variant", variants=("fp32", "int8")),
    DraftSpec("ngram", "ngram"),
)
PLAIN, GREEDY = DecodingRoute(), Sampling()
OPENINGS = (
    "Once upon a time",
    "One day, a little girl",
    "Tom and Lily were",
    "The big dog",
    "In the park there was",
    "Mom said,",
    "The sun",
    "A small bird wanted",
    "There was a boy named Tim.",
    "Sara liked to",
)
MIDDLES = ("", " saw a red ball", " was very sad because", " went to the", " had a toy. The toy", ' "I want')


@lru_cache(maxsize=1)
def checkpoint() -> Checkpoint:
    return read_llama2c(stories.data_file("stories260K.bin"), stories.data_file("tok512.bin"))


def write_story_bundle(folder: Path) -> GenerationManifest:
    folder.mkdir(parents=True)
    model, decoders = checkpoint(), dict[str, Decoder]()
    write_common(folder, model)
    for variant in VARIANTS:
        tensors = variant_tensors(model, variant)
        write_variant(folder, variant, tensors)
        decoders[variant.name] = open_variant(model, variant, tensors, threads=1)
    return write_rest(
        folder,
        model,
        name="stories",
        variants=VARIANTS,
        drafts=DRAFTS,
        probe=probe_tensors(model, decoders, prompt()),
        profile=GenerationProfile("cpu", 1, {}),
        created=1_700_000_000,
        data={},
    )


def prompt(text: str = "Once upon a time") -> list[int]:
    return [stories.BEGIN, *stories.tokenizer().encode(text)]


def prompts(count: int) -> list[list[int]]:
    """Different ones, of 3 to 20 tokens."""
    texts = [f"{a}{b}{c}" for c in (" and", "", " then", ".", "!") for b in MIDDLES for a in OPENINGS]
    return [prompt(text) for text in texts[:count]]


@dataclass(frozen=True)
class Written:
    """An answer: its tokens, and how many were proposed and accepted."""

    tokens: list[Token]
    proposed: int
    accepted: int

    @property
    def ids(self) -> list[int]:
        return [t.id for t in self.tokens]


def write(
    engine: GenerationEngine,
    words: Sequence[int],
    *,
    n: int = 64,
    route: DecodingRoute = PLAIN,
    sampling: Sampling = GREEDY,
    piece: int = 64,
) -> Written:
    """One answer from start to end."""
    sequence = engine.start(words, max_tokens=n, sampling=sampling, route=route)
    tokens, proposed, accepted = list[Token](), 0, 0
    while True:
        (one,) = engine.step([sequence], prompt_tokens=piece)
        tokens += one.tokens
        proposed, accepted = proposed + one.proposed, accepted + one.accepted
        if one.ended:
            assert not one.error
            return Written(tokens, proposed, accepted)
