"""Climbing the ladder of heads: the candidates, whole maps for convolutions, and rows in the right order."""

from __future__ import annotations

from typing import Any

import bundles
import numpy as np
import numpy.typing as npt
import pytest

from offramp_core.bundle import TensorSpec
from offramp_worker.prepare.heads.features import collect_maps, heads_of, ramp_at, tapped_logits
from offramp_worker.prepare.heads.fitting import Workshop, candidate_rungs, fit_convolutions, fit_given, fit_growing
from offramp_worker.prepare.heads.selection import RampCost
from offramp_worker.prepare.places.cuts import INPUT_POSITION, Place
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.source.data import HeadSplit
from offramp_worker.prepare.source.sources import Backbone

ENTRY = Place(INPUT_POSITION, "x", (bundles.CHANNELS, bundles.SIZE, bundles.SIZE))
PLACES = (Place(1, "c0", (bundles.WIDTH, 14, 14)), Place(2, "c1", (bundles.WIDTH, 7, 7)))
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    model = bundles._backbone(np.random.default_rng(0))
    shape = (bundles.CHANNELS, bundles.SIZE, bundles.SIZE)
    return Backbone(model, "tiny", TensorSpec("x", "FP32", shape), TensorSpec("logits", "FP32", (bundles.CLASSES,)))


def workshop(backbone: Backbone, *, rows: int, extra: int = 0, variations: int = 0) -> Workshop:
    x, more = bundles.inputs(rows, seed=3), bundles.inputs(extra, seed=4)
    return Workshop(backbone, (ENTRY, *PLACES), x, more, variations, 0, 1, Reporter(quiet=True))


def test_every_place_and_the_input_get_each_kind_that_fits_with_names_of_their_own() -> None:
    small = Place(3, "tiny", (8, 2, 2))
    tokens = Place(4, "tokens", (-1, 16))
    rungs = candidate_rungs((*PLACES, small, tokens), entry=ENTRY, exits={})
    kinds = {position: {r.head for r in rungs.all if r.position == position} for position in range(5)}
    everything = {"pooled-linear", "grid-linear", "grid-mlp", "conv"}
    assert [kinds[position] for position in range(5)] == [everything] * 3 + [
        {"pooled-linear"},
        {"mean-linear", "mean-mlp"},
    ]
    ids = [ramp.id for ramp in rungs.all]
    assert len(set(ids)) == len(ids)
    widths = {ramp.hidden for ramp in (*rungs.mlp, *rungs.narrow) if ramp.position == 1}
    assert len(widths) == 2


def test_maps_are_the_tensors_of_the_place_and_the_inputs_themselves(backbone: Backbone) -> None:
    x = bundles.inputs(70, seed=5)
    maps = collect_maps(backbone, PLACES[1], x, threads=1, advance=lambda _: None)
    node = ramp_at(PLACES[1], "pooled-linear")
    identity = {
        node.id: {"w1": np.eye(bundles.WIDTH, dtype=np.float32), "b1": np.zeros(bundles.WIDTH, dtype=np.float32)}
    }
    heads = heads_of((node,), PLACES, tensors=identity)
    _, (means,) = tapped_logits(backbone, heads, x, threads=1, advance=lambda _: None)
    np.testing.assert_allclose(maps.astype(np.float32).mean(axis=(2, 3)), means, atol=2e-2)
    at_input = collect_maps(backbone, ENTRY, x, threads=1, advance=lambda _: None)
    np.testing.assert_allclose(at_input, x, atol=1e-2)


@pytest.mark.slow
def test_convolutions_inside_and_at_the_input_learn_the_models_answers(backbone: Backbone) -> None:
    shop = workshop(backbone, rows=500, extra=100)
    ramps = (ramp_at(ENTRY, "conv", hidden=8), ramp_at(PLACES[1], "conv", hidden=8))
    linear = (ramp_at(PLACES[0], "pooled-linear"),)
    costs = {ramp.id: RampCost({1: 0.01}, {1: 0.1}) for ramp in (*linear, *ramps)}
    taught = fit_growing(
        shop,
        linear,
        costs,
        lambda training, validation: fit_given(shop, linear, training, validation),
        split="default",
        share=0.6,
    )
    assert taught.answers.shape == (270 + 100, bundles.CLASSES)
    taught = fit_convolutions(shop, ramps, taught)
    merits = taught.fitted.merits(costs)
    assert list(merits) == [*linear, *ramps]
    often = float(np.bincount(taught.fitted.reference.argmax(axis=1)).max()) / len(taught.fitted.reference)
    assert max(merits[ramp].agreement for ramp in ramps) > often + 0.05  # better than always saying the commonest class
    heads = heads_of(ramps, shop.places, tensors=taught.fitted.parameters)
    _, said = tapped_logits(backbone, heads, shop.validation_rows(taught.split), threads=1, advance=lambda _: None)
    for ramp, logits in zip(ramps, said, strict=True):
        np.testing.assert_array_equal(taught.fitted.head_outputs[ramp.id], logits)


def test_rows_that_train_come_in_the_order_of_their_answers_and_stop_at_the_limit(backbone: Backbone) -> None:
    """The stream first, then its variations, then the extra rows; validation rows never."""
    shop = workshop(backbone, rows=50, extra=20, variations=2)
    split = HeadSplit(train=20, head=30, total=50)
    whole = shop.training_rows(split, most=10**9)
    assert len(whole) == 20 + 40 + 20
    np.testing.assert_array_equal(whole[:20], shop.x[:20])
    np.testing.assert_array_equal(whole[20:60], shop.copies(split))
    np.testing.assert_array_equal(whole[60:], shop.extra)
    for most in (5, 20, 33, 70):
        np.testing.assert_array_equal(shop.training_rows(split, most=most), whole[:most])
    np.testing.assert_array_equal(shop.validation_rows(split), shop.x[20:30])
