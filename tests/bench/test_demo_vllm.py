"""``make demo-vllm`` without vLLM: its checkpoints, what a canary's share must be, and what makes it fail."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stories
from bench.demo.generate import Stream
from bench.demo.vllm import CONFIGURATIONS, GOOD, WORSE, Share, canary_percent, manifest_of, problems, share_of
from bench.vllm.stories import write_stories
from story_bundles import checkpoint

from offramp_core.control.spec import parse_spec
from offramp_worker.generate.llama.decoder import Cache
from offramp_worker.generate.llama.manifest import VariantEntry
from offramp_worker.generate.seam import REFERENCE
from offramp_worker.prepare.generation.checkpoint import Checkpoint
from offramp_worker.prepare.generation.huggingface import read_huggingface
from offramp_worker.prepare.generation.writing import open_variant, variant_tensors

TOLD: dict[str, Any] = {
    "streams": 1000,
    "broken": 0,
    "first_broken": [],
    "certified": GOOD,
    "verdicts": ["Succeeded", "RolledBack"],
    "why": "SlownessRejected",
    "share": {"weight": 30, "answers": 400, "canary": 121},
    "stretches": {
        "reference": {"streams": 100, "routes": {"fp32": 100}, "p50_ms": 200.0},
        "promoted": {"streams": 100, "routes": {GOOD: 98, "fp32": 2}, "p50_ms": 120.0},
        "after": {"streams": 100, "routes": {GOOD: 97, "fp32": 2, WORSE: 1}, "p50_ms": 120.0},
    },
}


def logits(model: Checkpoint, tokens: list[int]) -> np.ndarray:
    exact = VariantEntry(REFERENCE, 32, 32)
    decoder = open_variant(model, exact, variant_tensors(model, exact), threads=1)
    return decoder.run(Cache.of(model.architecture, len(tokens)), tokens, start=0, rows=range(len(tokens)))


def test_a_checkpoint_for_vllm_with_wider_heads_computes_what_stories260k_does(tmp_path: Path) -> None:
    write_stories(str(stories.data_file("stories260K.bin")), tmp_path / "wide")
    wide, tokens = read_huggingface(tmp_path / "wide"), [1, *stories.tokenizer().encode("Once upon a time, Lily saw a")]
    assert (wide.architecture.head_size, wide.begin_tokens) == (32, (1,))
    np.testing.assert_allclose(logits(wide, tokens), logits(checkpoint(), tokens), atol=1e-4)


def test_layers_that_add_nothing_change_no_logit(tmp_path: Path) -> None:
    write_stories(str(stories.data_file("stories260K.bin")), tmp_path / "long", layers=9)
    long, tokens = read_huggingface(tmp_path / "long"), [1, *stories.tokenizer().encode("Once upon a time, Lily saw a")]
    assert long.architecture.layers == 9
    np.testing.assert_allclose(logits(long, tokens), logits(checkpoint(), tokens), atol=1e-4)


def test_a_draft_is_the_first_layers_of_the_model(tmp_path: Path) -> None:
    weights = str(stories.data_file("stories260K.bin"))
    write_stories(weights, tmp_path / "whole")
    write_stories(weights, tmp_path / "draft", layers=2)
    whole, draft = (read_huggingface(tmp_path / name) for name in ("whole", "draft"))
    assert draft.architecture.layers == 2 and draft.tokenizer == whole.tokenizer
    assert all(np.array_equal(draft.matrices[name], whole.matrices[name]) for name in draft.matrices)


def test_what_the_user_writes_is_a_spec_and_pins_what_the_bundle_has(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path)
    manifest["spec"]["ramps"] |= {"mode": "Pinned", "pin": {"precision": WORSE, "ramps": []}}
    pin = parse_spec(manifest["spec"]).pin
    assert pin is not None and pin.precision in [c["name"] for c in CONFIGURATIONS["configurations"]]


def test_a_share_counts_what_was_sent_while_the_weight_stood() -> None:
    before = [Stream(at, arm="stable") for at in range(10)]
    canary = [Stream(10 + at, arm="canary" if at % 4 == 0 else "stable") for at in range(41)]
    after = [Stream(60 + at, arm="canary") for at in range(10)]
    broken = [Stream(20.5, arm="canary", error="broke off")]
    assert share_of([*before, *canary, *after, *broken], until=50) == Share(40, 10)
    assert share_of(before, until=math.inf) == Share(0, 0)


@pytest.mark.parametrize(("canary", "fits"), [(300, True), (250, True), (240, False), (365, False)])
def test_a_share_fits_its_weight_where_a_draw_explains_it(canary: int, fits: bool) -> None:
    assert Share(1000, canary).fits(30) is fits


def test_a_share_of_nothing_is_none() -> None:
    assert canary_percent([]) is None and canary_percent([Stream(0, arm="canary"), Stream(1)]) == 0.5


def test_a_story_as_it_should_be_told_has_no_problems() -> None:
    assert problems(TOLD) == []


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("broken",), 1, "1 streams broke"),
        (("certified",), WORSE, "was certified"),
        (("verdicts",), ["Succeeded", "Succeeded"], "the rollouts ended with"),
        (("why",), "Aborted", "fell by Aborted"),
        (("share",), {"weight": 30, "answers": 400, "canary": 200}, "the canary had 50.0 % of 400 answers"),
        (("share",), {"weight": 30, "answers": 0, "canary": 0}, "of 0 answers"),
        (("stretches", "reference", "routes"), {"fp32": 99, GOOD: 1}, "others than the reference answered"),
        (("stretches", "promoted", "routes"), {"fp32": 100}, "did not answer once it was promoted"),
        (("stretches", "after", "routes"), {WORSE: 100}, "did not go on after the rollback"),
        (("stretches", "promoted", "p50_ms"), 201.0, "saved no time"),
    ],
)
def test_an_act_that_was_not_seen_is_a_problem(path: tuple[str, ...], value: Any, told: str) -> None:
    summary = copy.deepcopy(TOLD)
    where = summary
    for part in path[:-1]:
        where = where[part]
    where[path[-1]] = value
    (problem,) = problems(summary)
    assert told in problem
