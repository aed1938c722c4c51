"""The benches that measure servers, as small as they get: whether they still run and what they leave. What comes out
says nothing here."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import pytest
from bench import engine, front, served
from bench.openloop import OpenLoopClient
from bench.peers import __main__ as peers
from bench.peers.environments import PEERS, NotInstalledError
from bench.report.page import make_page
from bench.report.pictures import draw_pictures
from bench.report.results import Results
from processes import plan_for
from rich.console import Console

from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.engine.execution.sessions import Sessions

SECONDS = 0.3
MODEL_SECONDS = 0.02  # pretended: loads are shares of what such a model could do
PAGE = Path("docs/benchmarks.md")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.write_wide_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    return load_bundle(folder)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(front, "CAPACITY_TRIALS", 2)
    yield


def finite(value: Any) -> bool:
    """Whether JSON can hold it: neither NaN nor infinity anywhere."""
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def assert_pictured(results: Path, name: str) -> None:
    """A file of that name is drawn and the page shows it."""
    page = results / "docs" / "page.md"
    pictures = draw_pictures(Results(results), page.parent / "images")
    assert pictures[name].is_file()
    assert f"(images/{name}.png)" in make_page(Results(results), pictures, page)


def test_overload_is_pictured(tmp_path: Path) -> None:
    quantiles = {"p50": 3.0, "p95": 9.0, "p99": None}
    stretch = {
        "exits": True,
        "requests": 10,
        "accepted_share": 0.5,
        "wrong": 0,
        "accepted_ms": quantiles,
        "refused_ms": quantiles,
    }
    found = {
        "slo_ms": 50.0,
        "overload": 2.0,
        "capacity": 9.0,
        "seconds": 2.0,
        "passed": {"right": True},
        "memory": {"growth": 0.01, "samples": [1, 2]},
        "stretches": [stretch, stretch],
    }
    (tmp_path / "soak.json").write_text(json.dumps(found))
    assert_pictured(tmp_path, "soak")


@pytest.mark.slow
def test_the_engines_bench(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ramps of random weights certify nothing: beside the plans that are found there are some to run."""
    given = {
        "fp32 uncertified": plan_for(bundle.path, {"r00-grid": "0.3", "r02-linear": "0.5"}),
        "any uncertified": plan_for(bundle.path, {bundles.SMALL: "0.3", "int8/r00-grid": "0.5"}, precision="int8"),
        "int8 exit-free": plan_for(bundle.path, precision="int8"),
    }
    certified = (
        plan_for(bundle.path, {"r00-grid": threshold}) for threshold in ("0.2", "0.4")
    )  # of batch 1, of batch 4
    found_plans = engine.plans
    monkeypatch.setattr(
        engine,
        "plans",
        lambda first, second, bundle: found_plans(first, second, bundle) | given | {"fp32 certified": next(certified)},
    )
    monkeypatch.setattr(engine, "BATCHES", (1, 4))
    monkeypatch.setattr(engine, "ROWS_PER_PAIR", {1: 8, 4: 8})
    told: list[str] = []
    found = engine.bench(bundle, bundles.inputs(120, seed=4), pairs=1, seconds=0.2, tell=told.append)
    names = {(row["batch"], row["plan"]) for row in found["plans"]}
    kinds = ("fp32 certified", "fp32 uncertified", "any certified", "any uncertified", "int8 exit-free")
    assert names == {(batch, kind) for batch in (1, 4) for kind in kinds} | {(4, "fp32 certified, of batch 1")}
    assert told and finite(found)
    assert all(row["worst"]["median"] > 0 for row in found["plans"] if row["plan"] in given)
    engine.keep(tmp_path / "engine.json", "tiny", found)
    assert "### tiny" in make_page(Results(tmp_path), {}, PAGE)
    assert_pictured(tmp_path, "engine-tiny")


@pytest.mark.slow
def test_the_bench_of_exits_through_http(bundle: Bundle, tmp_path: Path, quick: None) -> None:
    made = replace(served.prepared(bundle, bundles.inputs(120, seed=4), seconds=0.2), model_seconds=MODEL_SECONDS)
    found = served.bench(made, rounds=1, seconds=SECONDS, console=Console(quiet=True))
    assert set(found["arms"]) == set(made.plans) >= {"off"}
    assert all(set(row["loads"]) == {"0.3", "0.6", "0.9"} for row in found["arms"].values())
    assert found["arms"]["off"]["disagreement"] == 0.0
    assert finite(found)
    engine.keep(tmp_path / "served.json", "tiny", found)
    assert "1 rounds of 0.3 s a load" in make_page(Results(tmp_path), {}, PAGE)
    assert_pictured(tmp_path, "served-tiny")


def data(folder: Path) -> front.Data:
    x = bundles.inputs(8, seed=4)
    labels = Sessions(load_bundle(folder), threads=1).exact(x).argmax(axis=1)
    return front.Data(folder / "backbone.onnx", folder, x, labels)


@pytest.mark.slow
def test_the_front_ends_bench(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    monkeypatch.setattr(front, "load_data", lambda: data(folder))
    monkeypatch.setattr(front, "model_seconds", lambda _: MODEL_SECONDS)
    options = argparse.Namespace(rounds=1, seconds=SECONDS)
    found = front.run(lambda made: (front.bare(made), front.offramp(made)), options)
    for objective in ("loose", "tight"):
        assert set(found[objective]["servers"]) == {"bare", "offramp"}
        assert all(row["resident_mib"] > 10 for row in found[objective]["servers"].values())
    (tmp_path / "front.json").write_text(json.dumps(found))
    assert "1 rounds of 0.3 s" in make_page(Results(tmp_path), {}, PAGE)
    assert_pictured(tmp_path, "servers")


def test_peers_that_are_not_installed_are_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(*_: object, **__: object) -> None:
        raise NotInstalledError("no such package")

    monkeypatch.setattr(peers, "install", install)
    monkeypatch.setattr(peers, "OUT", tmp_path / "peers.json")
    assert peers.main(["--only", *peers.REQUESTS]) == 0
    found = json.loads((tmp_path / "peers.json").read_text())
    assert found == {name: {"skipped": "no such package"} for name in peers.REQUESTS}
    assert "ray: no such package" in make_page(Results(tmp_path), {}, PAGE)


@pytest.mark.parametrize("name", sorted(peers.REQUESTS))
def test_every_peer_is_talked_to_in_whole_requests_and_started_from_a_file_that_is_there(
    name: str, folder: Path
) -> None:
    contender = peers.contender(PEERS[name], data(folder))
    target = contender.target(1234)
    for request in target.requests:
        head, _, body = request.partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
    assert target.label(b'{"label": 3}') == 3
    assert any((Path("bench/peers/servers") / Path(part).name).is_file() for part in contender.command(1234))
    with OpenLoopClient(target) as client:
        assert client.target.name == name
