"""``offramp prepare --variants``: what is left out of a graph, what stays in the bundle, and a worker that serves
it."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import prepared
import pytest
import torch
from onnx import TensorProto, helper
from prepared import run
from processes import WorkerProcess, infer_json
from rich.console import Console
from safetensors.torch import save_file
from test_prepare_family_bundles import encoder, rows_for, tokens
from torch import nn

from offramp_core.bundle import RampSpec, TensorSpec
from offramp_core.errors import InvalidArgumentError
from offramp_core.precision import EXACT
from offramp_core.records import records_from_arrays
from offramp_core.tuning import Proposed, TuningRequest, tune
from offramp_worker.bundle.graph import tensor_values, with_outputs
from offramp_worker.bundle.load import load_bundle
from offramp_worker.devices import open_session
from offramp_worker.prepare.families import build_family
from offramp_worker.prepare.heads.selection import BUDGETS, RampCost, RampMerit
from offramp_worker.prepare.heads.side import Side
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle, variant_folder
from offramp_worker.prepare.places.places import find_places
from offramp_worker.prepare.precision import precisions
from offramp_worker.prepare.precision.folding import folded
from offramp_worker.prepare.precision.judging import Candidate
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.report import PrepareReport, print_report
from offramp_worker.prepare.source.sources import Backbone, load_backbone
from offramp_worker.prepare.variants import distilling, making
from offramp_worker.prepare.variants.choosing import Form, in_front, in_place
from offramp_worker.prepare.variants.distilling import Course, distill
from offramp_worker.prepare.variants.layers import damped, input_moments, layers_of
from offramp_worker.prepare.variants.lowrank import divide, low_rank
from offramp_worker.prepare.variants.making import Recipe, Studio, check_learnable, make_variants
from offramp_worker.prepare.variants.pruning import inner_channels, pruned
from offramp_worker.prepare.variants.shallow import blocks_of, without_blocks
from offramp_worker.prepare.variants.twin import Twin

PARAMETERS = {"blocks": "2", "width": "16", "channels": "1", "classes": str(prepared.CLASSES)}
STEPS = 25
BUDGET = 0.2


pytestmark = pytest.mark.slow  # exports and trains


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny layers only lose time to waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return prepared.images(64, seed=4)[0]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A residual network with blocks to leave out and channels to spare, which has learned something."""
    x, y = prepared.images(512, seed=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_family("resnet", PARAMETERS).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for rows in torch.randperm(512).split(32) * 2:
            loss = nn.functional.cross_entropy(model(torch.from_numpy(x)[rows]), torch.from_numpy(y)[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    weights = tmp_path_factory.mktemp("model") / "small.safetensors"
    save_file(model.eval().state_dict(), weights)
    return f"family:resnet?weights={weights}&" + "&".join(f"{key}={value}" for key, value in PARAMETERS.items())


@pytest.fixture(scope="module")
def network(uri: str, rows: np.ndarray) -> Backbone:
    return load_backbone(uri, rows)


@pytest.fixture(scope="module")
def graph(network: Backbone, rows: np.ndarray) -> onnx.ModelProto:
    """As variants are made of it."""
    return folded(network.model, keep={place.tensor for place in find_places(network, rows).places})


# What is left out


def test_the_module_that_learns_answers_as_the_graph_does_and_gives_back_what_it_learned(
    graph: onnx.ModelProto, rows: np.ndarray
) -> None:
    twin, read = Twin(graph), graph.graph.node[1].output[0]
    said, (feature,) = twin(torch.from_numpy(rows), [read])
    np.testing.assert_allclose(said.detach().numpy(), run(graph, rows), rtol=1e-4, atol=1e-4)
    seen = tensor_values(open_session(with_outputs(graph, [read]), threads=1), [read], rows, entry="input")[read]
    np.testing.assert_allclose(feature.detach().numpy(), seen, rtol=1e-4, atol=1e-4)
    said.square().mean().backward()
    with torch.no_grad():
        for weight in twin.parameters():
            weight.sub_(0.01 * weight.grad)
    other = onnx.ModelProto()
    other.CopyFrom(graph)
    twin.write_back(other)
    again, _ = twin(torch.from_numpy(rows))
    np.testing.assert_allclose(run(other, rows), again.detach().numpy(), rtol=1e-4, atol=1e-4)
    assert np.abs(run(other, rows) - run(graph, rows)).max() > 1e-3


@pytest.mark.parametrize("name", ["minilm", "vit"])
def test_encoders_learn_and_lose_channels_and_blocks(name: str, tmp_path: Path) -> None:
    uri, _ = encoder(name, tmp_path)
    x = rows_for(name, 8)
    found = find_places(load_backbone(uri, x, **tokens(x)), x)
    source = folded(found.backbone.model, keep={place.tensor for place in found.places})
    outputs, _ = Twin(source)(torch.from_numpy(x))
    np.testing.assert_allclose(outputs.detach().numpy(), run(source, x), rtol=1e-4, atol=1e-4)
    outputs.square().mean().backward()
    assert inner_channels(source, keep={place.tensor for place in found.places})
    assert blocks_of(source, found.places)


def test_all_of_the_energy_changes_no_answer_and_less_of_it_computes_less(
    graph: onnx.ModelProto, network: Backbone, rows: np.ndarray
) -> None:
    moments = input_moments(graph, layers_of(graph), rows, network.input, threads=1)
    some, divided = low_rank(graph, moments, energy=0.8)
    assert divided and onnx.checker.check_model(some) is None

    def multiplications(model: onnx.ModelProto) -> int:
        return sum(layer.matrix.size for layer in layers_of(model).values())

    assert multiplications(some) < multiplications(graph)
    assert run(some, rows).shape == run(graph, rows).shape


def test_a_matrix_of_low_rank_is_divided_exactly_and_what_inputs_never_show_is_left_out_first() -> None:
    random = np.random.default_rng(0)
    matrix = random.normal(size=(64, 8)) @ random.normal(size=(8, 48))
    halves = divide(matrix, None, energy=0.999999)
    assert halves is not None and halves[0].shape == (64, 8)
    np.testing.assert_allclose(halves[0] @ halves[1], matrix, atol=1e-9)
    full = random.normal(size=(64, 48))
    seen = np.diag([1.0] * 8 + [0.0] * 56)  # inputs vary along eight axes alone
    shown = divide(full, seen, energy=0.99)
    assert shown is not None
    np.testing.assert_allclose((shown[0] @ shown[1])[:8], full[:8], atol=0.2)


def test_channels_inside_of_blocks_go_and_the_next_layer_makes_up_for_them(
    graph: onnx.ModelProto, network: Backbone, rows: np.ndarray
) -> None:
    layers = layers_of(graph)
    moments = input_moments(graph, layers, rows, network.input, threads=1)
    cuts = {place.tensor for place in find_places(network, rows).places}
    assert len(inner_channels(graph, keep=cuts)) == 6  # one for each block; the stream keeps its width
    thin, pairs = pruned(graph, moments, share=0.5, keep=cuts)
    assert pairs == 6
    widths = [layer.shape[0] for layer in layers_of(thin).values() if layer.is_convolution]
    assert widths == [16, 8, 16, 8, 16, 16, 32, 16, 32, 32, 64, 32, 64]
    inner = inner_channels(graph, keep=cuts)[0]
    reader = layers_of(thin)[inner.readers[0].node.name]
    whole, every = inner.readers[0].matrix, damped(moments[inner.readers[0].node.name])
    maker = layers_of(thin)[inner.maker.node.name].matrix
    stay = [int(np.flatnonzero((inner.maker.matrix == column[:, None]).all(axis=0))[0]) for column in maker.T]
    rows_left = (np.array(stay)[:, None] * 9 + np.arange(9)).ravel()

    def lost(fitted: np.ndarray) -> float:
        error = whole.copy()
        error[rows_left] -= fitted
        return float(np.trace(error.T @ every @ error))

    assert lost(reader.matrix) < 0.9 * lost(whole[rows_left])


def test_weights_that_an_old_file_lists_as_inputs_are_fixed_and_can_be_pruned(
    graph: onnx.ModelProto, network: Backbone, rows: np.ndarray, tmp_path: Path
) -> None:
    old = onnx.ModelProto()
    old.CopyFrom(graph)
    old.ir_version = 3
    old.graph.input.extend(helper.make_tensor_value_info(w.name, w.data_type, w.dims) for w in old.graph.initializer)
    onnx.save(old, tmp_path / "old.onnx")
    read = load_backbone(str(tmp_path / "old.onnx"), rows)
    moments = input_moments(read.model, layers_of(read.model), rows, read.input, threads=1)
    thin, _ = pruned(read.model, moments, share=0.5, keep=())
    assert run(thin, rows).shape == run(network.model, rows).shape


def test_depthwise_convolutions_lose_the_channels_of_the_layers_around_them() -> None:
    random = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(random.normal(size=shape).astype(np.float32), name)

    value = helper.make_tensor_value_info
    model = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Conv", ["x", "w1", "b1"], ["a"], name="wide"),
                helper.make_node("Relu", ["a"], ["r"], name="relu"),
                helper.make_node("Conv", ["r", "w2", "b2"], ["d"], name="depthwise", group=24, pads=[1, 1, 1, 1]),
                helper.make_node("Mul", ["d", "gain"], ["m"], name="gain"),
                helper.make_node("Conv", ["m", "w3"], ["y"], name="narrow"),
            ],
            "inverted",
            [value("x", TensorProto.FLOAT, ["batch", 8, 6, 6])],
            [value("y", TensorProto.FLOAT, ["batch", 8, 6, 6])],
            [
                weight("w1", 24, 8, 1, 1),
                weight("b1", 24),
                weight("w2", 24, 1, 3, 3),
                weight("b2", 24),
                weight("gain", 1, 24, 1, 1),
                weight("w3", 8, 24, 1, 1),
            ],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
    )
    model.ir_version = 10
    thin, pairs = pruned(model, {}, share=0.5, keep=())
    sizes = {tensor.name: list(tensor.dims) for tensor in thin.graph.initializer}
    assert pairs == 1
    assert [sizes[n][0] for n in ("w1", "b1", "w2", "b2")] == [16] * 4
    assert sizes["gain"] == [1, 16, 1, 1] and sizes["w3"] == [8, 16, 1, 1]
    assert run(thin, random.normal(size=(2, 8, 6, 6)).astype(np.float32)).shape == (2, 8, 6, 6)


def test_blocks_between_features_of_one_shape_can_be_left_out(
    graph: onnx.ModelProto, network: Backbone, rows: np.ndarray
) -> None:
    places = find_places(network, rows).places
    blocks = blocks_of(graph, places)
    assert len(blocks) == 4  # two of the first stage, one of each of the others; where the map shrinks they stay
    less = without_blocks(graph, blocks)
    assert len(layers_of(less)) == len(layers_of(graph)) - 2 * len(blocks)
    onnx.checker.check_model(less)
    assert run(less, rows).shape == run(graph, rows).shape


def test_a_graph_without_channels_of_its_own_cannot_be_pruned(graph: onnx.ModelProto) -> None:
    every = {name for node in graph.graph.node for name in node.output}
    with pytest.raises(InvalidArgumentError, match="no two of its layers share channels"):
        pruned(graph, {}, share=0.5, keep=every)


def test_an_operator_that_cannot_learn_is_named_with_the_next_step(graph: onnx.ModelProto) -> None:
    other = onnx.ModelProto()
    other.CopyFrom(graph)
    other.graph.node[1].op_type = "Selu"
    with pytest.raises(InvalidArgumentError, match=r"variants: the model has the operator Selu.*leave --variants out"):
        Twin(other)


@pytest.mark.parametrize("kind", ["Softmax", "Clip"])
def test_an_operator_of_an_older_kind_is_refused_before_anything_is_trained(kind: str, network: Backbone) -> None:
    """Softmax over all but the first axis, and bounds that are attributes, are of operator sets before 13 and 11."""
    attributes = {"Softmax": {}, "Clip": {"min": 0.0, "max": 6.0}}[kind]
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="r"),
        helper.make_node(kind, ["r"], ["c"], name="c", **attributes),
        helper.make_node("ReduceMean", ["c"], ["y"], name="y", axes=[2, 3], keepdims=0),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", ["n", 3, 4, 4]), ("y", ["n", 3]))
    ]
    graph = helper.make_graph(nodes, "old", values[:1], values[1:])
    old = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 10)], ir_version=8)
    backbone = replace(network, model=old, input=replace(network.input, name="x", shape=(3, 4, 4)))
    rows = np.random.default_rng(0).normal(size=(4, 3, 4, 4)).astype(np.float32)
    with pytest.raises(InvalidArgumentError, match=r"variants: .*leave --variants out"):
        check_learnable(backbone, rows)


def test_a_matrix_behind_a_convolution_is_not_taken_for_a_reader_of_its_channels() -> None:
    """It multiplies the last axis, as in networks for spectrograms, though that is as long as there are channels."""
    net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Linear(32, 16))
    file = io.BytesIO()
    torch.onnx.export(net, (torch.zeros(1, 3, 32, 32),), file, dynamo=False, opset_version=17)
    graph = folded(onnx.load_from_string(file.getvalue()), keep=set())
    with pytest.raises(InvalidArgumentError, match="no two of its layers share channels"):
        pruned(graph, {}, share=0.5, keep=())


def test_a_graph_that_is_not_the_one_that_was_noted_is_made_again(tmp_path: Path) -> None:
    recipe, model = Recipe("pruned25", channels=0.25), onnx.ModelProto(ir_version=8)
    making._keep(tmp_path, recipe, making.Made("pruned25", "how", model), "key")
    kept = making._kept(tmp_path, recipe, "key")
    assert kept is not None and kept.model == model
    (tmp_path / "pruned25.onnx").write_bytes(b"")
    assert making._kept(tmp_path, recipe, "key") is None
    (tmp_path / "pruned25.json").write_text("[" * 100_000)
    assert making._kept(tmp_path, recipe, "key") is None


# What stays


def candidate(name: str, time: float, expected: float, refused: str = "") -> Candidate:
    return Candidate(name, expected, expected, {1: time}, refused)


def stays(*forms: Candidate, others: tuple[Candidate, ...] = ()) -> Mapping[str, str]:
    judged = in_place([Form(c.method, "", onnx.ModelProto(), c) for c in forms], others)
    return {name: worth.refused for name, worth in judged.items()}


def test_what_is_slower_than_another_at_no_less_disagreement_is_refused_with_both_figures() -> None:
    said = stays(candidate("a", 0.5, 0.02), candidate("b", 0.4, 0.02), others=(candidate("int8", 0.45, 0.001),))
    assert said["b"] == ""
    assert said["a"].startswith("b takes 0.40 of the fp32 time instead of 0.50 and disagrees no more (2.00%")


def test_a_form_stays_where_it_is_the_fastest_within_some_budget() -> None:
    int8 = candidate("int8", 0.5, 0.002)
    assert stays(candidate("a", 0.3, 0.009), candidate("b", 0.2, 0.04), others=(int8,)) == {"a": "", "b": ""}
    said = stays(candidate("c", 0.3, 0.06), others=(int8,))
    assert said["c"] == "at no budget up to 5% is it the fastest that keeps it"


def test_what_cannot_pay_alone_is_no_reason_to_refuse_another() -> None:
    broken = candidate("a", 0.1, 0.0, refused="what it says is no finite number")
    assert stays(broken, candidate("b", 0.5, 0.01))["b"] == ""


def in_front_of(name: str, utility: float, refused: str = "") -> Side:
    """A form that alone saves so much of the time at every budget."""
    costs = RampCost({1: 0.0}, {1: 0.0})
    spec = RampSpec(f"side-{name}", "input", 0, 0.0, "model", 1)
    return Side(
        spec, name, onnx.ModelProto(), None, {}, RampMerit(1.0, dict.fromkeys(BUDGETS, utility), costs), refused
    )


def test_in_front_of_the_model_the_one_that_saves_most_stays() -> None:
    fronts = [in_front_of("a", 0.5), in_front_of("b", 0.4), in_front_of("c", 0.9, refused="it cannot pay")]
    said = {side.source: side.refused for side in in_front(fronts, [])}
    assert said["a"] == "" and said["c"] == "it cannot pay"
    assert said["b"].endswith("at 5%, side-a 50% and this one 40% of the time")
    assert in_front(fronts[:1], [in_front_of("given", 0.6)])[0].refused
    assert in_front([], []) == []


# The whole of prepare, and a worker


@pytest.fixture(scope="module")
def request_(uri: str, tmp_path_factory: pytest.TempPathFactory) -> PrepareRequest:
    folder = tmp_path_factory.mktemp("variants")
    np.savez(folder / "data.npz", x=prepared.images(900, seed=2)[0])
    return PrepareRequest(
        model=uri,
        data=str(folder / "data.npz"),
        out=folder / "bundle",
        name="small",
        head_share=0.4,
        profile_seconds=0.1,
        compile_limit=0,
        variants=True,
        variant_seconds=STEPS,
    )


RECIPES = (Recipe("lowrank80", energy=0.8), Recipe("pruned50", channels=0.5))


@pytest.fixture(scope="module")
def report(request_: PrepareRequest) -> PrepareReport:
    """Of a bundle in which all variants stay, whatever this machine says of their times; each learns ``STEPS``
    steps."""
    ticks = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precisions, "RECIPES", RECIPES)
        patch.setattr(precisions, "in_place", lambda forms, _: {f.name: replace(f.worth, refused="") for f in forms})
        patch.setattr(distilling, "time", SimpleNamespace(thread_time=lambda: next(ticks)))
        patch.setattr(distilling, "BATCH", 32)
        return prepare_bundle(request_, Reporter(quiet=True))


def test_variants_are_precisions_of_the_bundle_with_exits_and_how_they_were_made(report: PrepareReport) -> None:
    bundle = load_bundle(report.out)
    assert {"lowrank80", "pruned50", "lowrank80int8", "pruned50int8"} <= set(bundle.backbones)
    methods = {spec.name: spec.method for spec in bundle.manifest.backbones}
    assert "of low rank" in methods["lowrank80"] and "steps of distillation" in methods["lowrank80"]
    assert "50% of the channels" in methods["pruned50int8"] and "static-" in methods["pruned50int8"]
    of_variant = [ramp for ramp in bundle.manifest.ramps if ramp.precision == "pruned50"]
    lines = {line.verdict.spec.id: line.verdict.refused for line in report.lines}
    assert of_variant or any(name.startswith("pruned50/") and reason for name, reason in lines.items())


def test_the_report_has_every_form_with_its_time_disagreement_and_memory(report: PrepareReport) -> None:
    points = {point.name: point for point in report.frontier}
    assert set(points) >= {EXACT, "lowrank80", "pruned50", "lowrank80int8", "pruned50int8"}
    assert points["pruned50"].size_bytes < points[EXACT].size_bytes
    assert points["pruned50int8"].size_bytes < points["pruned50"].size_bytes
    kept = json.loads((report.out / "report.json").read_text())["frontier"]
    assert [point["name"] for point in kept] == [point.name for point in report.frontier]
    assert (report.out / "frontier.png").read_bytes().startswith(b"\x89PNG")
    shown = io.StringIO()
    print_report(report, Console(file=shown, width=200))
    assert "Forms of the model" in shown.getvalue() and "pruned50int8" in shown.getvalue()


def test_nothing_is_left_beside_the_bundle(request_: PrepareRequest, report: PrepareReport) -> None:
    assert not variant_folder(request_.out).exists()


def test_a_worker_serves_a_variant_under_a_certified_plan(report: PrepareReport, tmp_path: Path) -> None:
    bundle = load_bundle(report.out)
    manifest, name = bundle.manifest, "lowrank80"
    with np.load(report.out / "records.npz") as file:
        records = records_from_arrays(dict(file))
    outcome = tune(
        records,
        TuningRequest(
            max_disagreement=BUDGET,
            delta=0.05,
            test_index=1,
            ramp_ids=tuple(c.id for c in bundle.columns if c.precision in ("", EXACT)),
            backbone_digest=manifest.backbone_digest,
            ramp_set_digest=manifest.ramp_set_digest,
            max_overhead=1.0,
            precisions=(name,),
        ),
    )
    assert isinstance(outcome, Proposed), outcome
    plan = outcome.plan
    assert plan.precision == name
    config = {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "RampConfig",
        "metadata": {"name": plan.name("small")},
        "spec": plan.to_mapping(),
        "status": {"state": "Stable", "certificates": [outcome.certificate.to_mapping()]},
    }
    (tmp_path / "plan.json").write_text(json.dumps(config))
    env = {"OFFRAMP_FIXED_PLAN": str(tmp_path / "plan.json"), "OFFRAMP_STATE_DIR": str(tmp_path)}
    x = prepared.images(24, seed=9)[0]
    asked = infer_json(x)
    asked["inputs"][0]["name"] = manifest.inputs[0].name
    expected = run(bundle.backbones[name], x)
    with WorkerProcess(report.out, control_plane=False, env=env) as worker:
        reply = worker.public.post("/v2/models/small/infer", json=asked).json()
    assert "parameters" in reply, reply
    exits = str(reply["parameters"]["exit"]).split(",")
    exits = exits * len(x) if len(exits) == 1 else exits
    assert set(exits) <= {"final", *(ramp.id for ramp in plan.ramps)}
    logits = np.array(reply["outputs"][0]["data"], dtype=np.float32).reshape(len(x), -1)
    ended = [i for i, where in enumerate(exits) if where == "final"]
    np.testing.assert_allclose(logits[ended], expected[ended], rtol=1e-3, atol=1e-3)


def test_a_run_that_was_stopped_goes_on_with_the_variants_that_were_finished(
    network: Backbone, rows: np.ndarray, tmp_path: Path
) -> None:
    places, ticks = find_places(network, rows).places, itertools.count()
    studio = Studio(
        network, places, (places[-1].tensor,), rows[:32], rows[32:], 2.0, 0, 1, tmp_path / "kept", Reporter(quiet=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distilling, "time", SimpleNamespace(thread_time=lambda: next(ticks)))
        first = make_variants(studio, RECIPES[:1])
        taught = next(ticks)
        again = make_variants(studio, RECIPES[:1])
        assert next(ticks) == taught + 1
        other, second = make_variants(studio, RECIPES)
        before, taught = taught, next(ticks)
        assert taught > before + 2
        make_variants(replace(studio, seed=1), RECIPES[:1])
        assert next(ticks) > taught + 1
    assert first[0].model.SerializeToString() == again[0].model.SerializeToString() == other.model.SerializeToString()
    assert second.name == "pruned50"


def test_texts_of_about_one_length_learn_together(network: Backbone) -> None:
    lengths = np.arange(256) % 2 * 50 + 10  # half of them 10 tokens, half of them 60
    rows = np.where(np.arange(64) < lengths[:, None], 1, 0)
    tokens = TensorSpec("input", "INT64", (-1,), pad=0, longest=64, values=2)
    course = Course(network.model, rows, rows, tokens, network.scale, 1.0, 0)
    batches = list(itertools.islice(distilling._batches(course, np.random.default_rng(0)), 32))
    assert all(len(batch) == distilling.BATCH for batch in batches)
    assert np.mean([batch.shape[1] for batch in batches]) < 48  # 64 if they were drawn one by one
    assert 0.4 < np.mean([(batch.sum(axis=1) == 60).mean() for batch in batches]) < 0.6  # drawn as often


@pytest.mark.parametrize(("rate", "kept"), [(1e3, False), (1e-3, True)], ids=["it gets worse", "it gets better"])
def test_of_what_a_variant_was_and_became_the_best_on_unseen_rows_stays(
    graph: onnx.ModelProto, network: Backbone, rows: np.ndarray, rate: float, kept: bool
) -> None:
    unseen, ticks = prepared.images(512, seed=5)[0], itertools.count(step=0.02)
    exact = run(graph, unseen).argmax(axis=1)
    moments = input_moments(graph, layers_of(graph), rows, network.input, threads=1)
    thin, _ = pruned(graph, moments, share=0.85, keep=())  # so much that what is learned outweighs a row or two
    course = Course(graph, rows, unseen, network.input, network.scale, 1.0, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distilling, "time", SimpleNamespace(thread_time=lambda: next(ticks)))
        patch.setitem(distilling.LEARNING_RATES, "images", rate)
        learned = distill(thin, course, read=(), advance=lambda _: None)
    before, after = (int((run(model, unseen).argmax(axis=1) != exact).sum()) for model in (thin, learned.model))
    assert (learned.kept > 0) is kept and learned.steps > 10
    assert after < before if kept else after == before


def test_a_recipe_that_does_not_fit_says_why_and_the_others_are_made(
    network: Backbone, rows: np.ndarray, tmp_path: Path
) -> None:
    studio = Studio(network, (), (), rows[:32], rows[32:], 1.0, 0, 1, tmp_path / "kept", Reporter(quiet=True))
    (shallow,) = make_variants(studio, [Recipe("shallow50", blocks=0.5)])
    assert shallow.model is None
    assert shallow.refused == "it has 0 blocks between features of one shape, too few to leave any out"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precision": "exact"}, "variants answer differently, which --precision exact rules out"),
        ({"device": "cuda"}, "variants are tried on CPUs alone; leave --variants out with --device cuda"),
        ({"variant_seconds": 0.0}, r"variant-seconds is 0.0; it must lie in \[1, 86400\]"),
        ({"head_share": 0.1}, r"data: variants would learn from \d+ rows, and need 200 at least"),
        ({"variant_seconds": float("nan")}, r"variant-seconds is nan; it must lie in \[1, 86400\]"),
    ],
    ids=str,
)
def test_a_request_that_contradicts_itself_is_refused(
    request_: PrepareRequest, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        prepare_bundle(replace(request_, out=tmp_path / "bundle", **change), Reporter(quiet=True))  # type: ignore[arg-type]
