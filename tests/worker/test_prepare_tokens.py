"""Text models: masks derived from the ids, rows of different length, and what is refused; to the worker's replies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from test_engine import Bench
from tests.worker.exported import Repository
from tests.worker.processes import WorkerProcess, document, plan_for
from tests.worker.texts import POSITIONS, SEP, TOPICS, WORDS, own_answers, text_model, texts

from offramp_core.bundle import TensorSpec
from offramp_core.errors import InvalidArgumentError, ModelRefusedError
from offramp_worker.bundle.lengths import bucket_length, buckets, by_length, pad_rows, typical_batch
from offramp_worker.bundle.load import load_bundle
from offramp_worker.devices import open_session
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.places.places import find_places
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.source.sources import load_backbone

pytestmark = pytest.mark.slow  # exports with torch

SPEC = TensorSpec("input_ids", "INT64", (-1,), pad=0, longest=100, values=50)
INPUTS = {
    "ids alone": ("input_ids",),
    "ids and mask": ("input_ids", "attention_mask"),
    "ids, mask and types": ("input_ids", "attention_mask", "token_type_ids"),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A prepared bundle, and the model's own file."""
    folder = tmp_path_factory.mktemp("text")
    model = text_model(folder / "topics.onnx")
    np.savez(folder / "data.npz", x=texts(600, seed=1))
    request = PrepareRequest(
        model=str(model),
        data=str(folder / "data.npz"),
        out=folder / "bundle",
        profile_seconds=0.1,
        precision="exact",
        compile_limit=0,
    )
    prepare_bundle(request, Reporter(quiet=True))
    return folder / "bundle", model


@pytest.mark.parametrize("names", INPUTS.values(), ids=INPUTS.keys())
def test_a_text_model_becomes_a_graph_of_ids_that_answers_as_its_file_does(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    model, x = text_model(tmp_path / "m.onnx", inputs=names), texts(30, seed=2)
    backbone = load_backbone(str(model), x, sep=SEP)
    assert backbone.input == TensorSpec("input_ids", "INT64", (-1,), pad=0, longest=32, values=WORDS)
    session = open_session(backbone.model, threads=1)
    assert [value.name for value in session.get_inputs()] == ["input_ids"]
    (logits,) = session.run(None, {"input_ids": np.pad(x, ((0, 0), (0, 9)))})
    np.testing.assert_allclose(logits, own_answers(model, x), atol=1e-5)


def test_a_pair_of_texts_is_answered_as_a_pair(tmp_path: Path) -> None:
    model = text_model(tmp_path / "m.onnx", inputs=INPUTS["ids, mask and types"])
    x = texts(30, seed=2)
    x[:, 4] = np.where(x[:, 4] == 0, 0, SEP)  # a separator within the text, and more of them by chance
    backbone = load_backbone(str(model), x, sep=SEP)
    (logits,) = open_session(backbone.model, threads=1).run(None, {"input_ids": np.pad(x, ((0, 0), (0, 9)))})
    np.testing.assert_allclose(logits, own_answers(model, x), atol=1e-5)
    (single,) = open_session(load_backbone(str(model), x, sep=WORDS - 1).model, threads=1).run(None, {"input_ids": x})
    assert np.abs(single - logits).max() > 0.01  # the types matter


def test_a_model_that_reads_token_types_is_refused_where_the_separator_is_not_known(tmp_path: Path) -> None:
    model = text_model(tmp_path / "m.onnx", inputs=INPUTS["ids, mask and types"])
    with pytest.raises(InvalidArgumentError, match=r"which id separates two texts is not known; .* --sep-id"):
        load_backbone(str(model), texts(20, seed=2))
    with pytest.raises(InvalidArgumentError, match=r"sep-id is 500; it must lie in \[0, 119\]"):
        load_backbone(str(model), texts(20, seed=2), sep=500)


def test_there_is_an_exit_at_the_embedding_and_after_every_layer_though_all_layers_read_the_mask(
    tmp_path: Path,
) -> None:
    x = texts(20, seed=3)
    found = find_places(load_backbone(str(text_model(tmp_path / "m.onnx")), x), x)
    places = found.places
    assert found.n_cuts >= 3
    assert [place.shape for place in places][:2] == [(-1, 24), (-1, 24)]
    assert places[0].tensor == "h0"
    assert {"h1"} <= {place.tensor for place in places}


def test_the_longest_row_a_model_takes_is_found_by_trying(tmp_path: Path) -> None:
    x = texts(20, seed=3, longest=40)
    spec = load_backbone(str(text_model(tmp_path / "m.onnx")), x).input
    assert spec.longest == 40  # 64 is beyond its table of 48 positions
    assert POSITIONS < 64


def test_a_model_without_a_mask_is_refused_because_filling_up_would_change_its_answers(tmp_path: Path) -> None:
    model = text_model(tmp_path / "m.onnx", inputs=("input_ids",), masked=False)
    with pytest.raises(ModelRefusedError, match="changes when it is filled up with id 0"):
        load_backbone(str(model), texts(20, seed=4))


def no_table(folder: Path) -> Path:
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["f", "axis"], ["s"], keepdims=1),
        helper.make_node("MatMul", ["s", "w"], ["y"]),
    ]
    constants = [
        numpy_helper.from_array(np.array([1]), "axis"),
        numpy_helper.from_array(np.ones((1, 3), dtype=np.float32), "w"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["n", "l"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        constants,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), folder / "m.onnx")
    return folder / "m.onnx"


def unknown_input(folder: Path) -> Path:
    model = onnx.load(text_model(folder / "m.onnx"))
    model.graph.input.append(helper.make_tensor_value_info("bias_ids", TensorProto.INT64, ["batch", "length"]))
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


REFUSED = {
    "no embedding": (no_table, texts(20, seed=5), {}, "no embedding table is looked up by input 'input_ids'"),
    "an input of its own": (unknown_input, texts(20, seed=5), {}, "inputs are input_ids, attention_mask, bias_ids"),
    "floats for ids": (
        lambda d: text_model(d / "m.onnx"),
        np.ones((20, 4), np.float32),
        {},
        "the model takes token ids",
    ),
    "ids too large": (lambda d: text_model(d / "m.onnx"), texts(20, seed=5) + 50, {}, "the model knows 0 to 119"),
    "pad id too large": (
        lambda d: text_model(d / "m.onnx"),
        texts(20, seed=5),
        {"pad": 500},
        r"pad-id is 500; it must lie in \[0, 119\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_text_models_and_data_that_do_not_fit_are_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    make, x, options, message = REFUSED[case]
    with pytest.raises((InvalidArgumentError, ModelRefusedError), match=message):
        load_backbone(str(make(tmp_path)), x, **options)


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_rows_of_any_length_are_put_together_unchanged_and_filled_up_to_one_bucket(
    lengths: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    parts = [rng.integers(1, 50, (rng.integers(1, 3), length)) for length in lengths]
    batch = pad_rows(parts, SPEC)
    assert batch.shape[1] in buckets(longest=100)
    assert batch.shape[1] == bucket_length(max(lengths), longest=100)
    rows = [row for part in parts for row in part]
    for got, row in zip(batch, rows, strict=True):
        np.testing.assert_array_equal(got[: len(row)], row)
        assert (got[len(row) :] == 0).all()


def test_padding_that_a_client_sent_is_cut_off_to_the_bucket_that_is_needed() -> None:
    sent = np.zeros((2, 100), dtype=np.int64)
    sent[:, :5] = 7
    assert pad_rows([sent], SPEC).shape == (2, 16)


def test_rows_are_run_in_order_of_length_and_a_typical_batch_has_the_median_length() -> None:
    x = np.zeros((64, 100), dtype=np.int64)
    used = np.random.default_rng(0).permutation(np.repeat([10, 60], [48, 16]))
    for row, length in zip(x, used, strict=True):
        row[:length] = 1
    order = np.concatenate(list(by_length(x, SPEC, size=16)))
    assert sorted(order) == list(range(64))
    assert (np.diff(used[order]) >= 0).all()
    assert typical_batch(x, SPEC, size=1).shape == (1, 16)
    assert typical_batch(x, SPEC, size=256).shape == (256, 64)


def test_a_prepared_text_model_has_ramps_and_its_rows_are_answered_as_if_alone(bundle: tuple[Path, Path]) -> None:
    folder, model = bundle
    loaded, x = load_bundle(folder), texts(40, seed=7)
    assert {ramp.head for ramp in loaded.ramps} <= {"mean-linear", "mean-mlp"}
    assert loaded.ramps
    sessions = Sessions(loaded, threads=1)
    batch = pad_rows([row[None, : int((row != 0).sum())] for row in x], loaded.manifest.inputs[0])
    np.testing.assert_allclose(sessions.exact(batch), own_answers(model, x), atol=1e-5)
    wide, narrow = (sessions.tapped(rows) for rows in (np.pad(x, ((0, 0), (0, 12))), batch))
    np.testing.assert_allclose(wide.logits, narrow.logits, atol=1e-5)
    assert float(np.abs(wide.uncertainty - narrow.uncertainty).max()) < 1e-3


def test_texts_leave_in_one_graph_where_a_worker_lets_them_leave(bundle: tuple[Path, Path], tmp_path: Path) -> None:
    """Every stage reads the ids besides its features, and a text of nothing but padding may not leave."""
    ramps = [ramp.id for ramp in load_bundle(bundle[0]).ramps]
    plan = plan_for(bundle[0], {ramps[0]: "0.4", ramps[-1]: "0.5"})
    x = texts(60, seed=8)
    x[17] = 0
    with WorkerProcess(bundle[0]) as worker:
        assert worker.deliver(document(plan)).status_code == 200
        tensor = {"name": "input_ids", "datatype": "INT64", "shape": list(x.shape), "data": x.reshape(-1).tolist()}
        name = load_bundle(bundle[0]).manifest.name
        reply = worker.public.post(f"/v2/models/{name}/infer", json={"inputs": [tensor]}).raise_for_status().json()
    outputs, exits = Repository.of(bundle[0], plan, tmp_path / "models").answer(x)
    assert exits == reply["parameters"]["exit"].split(",")
    assert exits[17] == "final" and len(set(exits)) == 3
    served = {o["name"]: np.array(o["data"], dtype=float).reshape(outputs[o["name"]].shape) for o in reply["outputs"]}
    np.testing.assert_array_equal(outputs["label"], served["label"])
    np.testing.assert_allclose(outputs["logits"], served["logits"], rtol=1e-4, atol=1e-4)


@pytest.fixture
def judge(bundle: tuple[Path, Path]) -> Iterator[Callable[..., Any]]:
    """Serves batches of (rows, words) that take two seconds each under limits, and tells what was counted."""
    loaded = load_bundle(bundle[0])
    bench = Bench(loaded, Sessions(loaded, threads=1))
    bench.engine.start()

    def serve(*batches: tuple[int, int], **limits: Any) -> Any:
        two_stages = {loaded.ramps[-1].id: "0"}  # and nothing leaves at the first
        bench.activate(bundle[0], two_stages, wrap=lambda stage: bench.slowed(stage, 1.0), **limits)
        for shape in batches:
            bench.serve(np.full(shape, 7, dtype=np.int64), one_by_one=False)
        return bench.counts(1)

    yield serve
    bench.engine.close()
    assert bench.engine.join(30.0)


def test_a_batch_of_long_texts_is_judged_by_the_limit_of_its_length(judge: Callable[..., Any]) -> None:
    limits = {"slow_seconds": {"2": 1.5, "3": 2.5}, "slow_seconds_by_length": {"2x16": 1.5, "2x32": 2.5, "3x32": 1.5}}
    counts = judge((2, 5), (2, 20), **limits)
    assert (counts.judged_batches, counts.slow_batches) == (2, 1), "the short one was slow, the long one was not"
    assert set(counts.execution) == {"2"} and set(counts.execution_by_length) == {"2x16", "2x32"}
    counts = judge((3, 5), **limits)
    assert (counts.judged_batches, counts.slow_batches) == (3, 1), "a length without a limit has that of its rows"


def test_an_operator_that_knows_no_lengths_judges_texts_by_size(judge: Callable[..., Any]) -> None:
    counts = judge((2, 5), (2, 20), (1, 20), slow_seconds={"2": 2.5, "1": 0.5})
    assert (counts.judged_batches, counts.slow_batches) == (3, 1)


def test_requests_of_different_length_in_flight_together_get_their_own_answers(bundle: tuple[Path, Path]) -> None:
    folder, model = bundle
    x = texts(24, seed=8)
    expected = own_answers(model, x)
    answers: dict[int, list[float]] = {}

    with WorkerProcess(folder, control_plane=False) as worker:

        def ask(i: int) -> None:
            words = x[i][: int((x[i] != 0).sum())]
            body = {"name": "input_ids", "datatype": "INT64", "shape": [1, len(words)], "data": words.tolist()}
            reply = worker.public.post("/v2/models/topics/infer", json={"inputs": [body]}).raise_for_status().json()
            answers[i] = next(out["data"] for out in reply["outputs"] if out["name"] == "logits")

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(x))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        np.testing.assert_allclose([answers[i] for i in range(len(x))], expected, atol=1e-5)

        bad = {
            "an id beyond the table": ([1, 3], [1, 2, WORDS], "holds ids from 1 to 120"),
            "a negative id": ([1, 3], [1, -2, 3], "holds ids from -2 to 3"),
            "too long": ([1, 40], [1] * 40, r"takes [n, 1 to 32]"),
            "no token": ([1, 0], [], r"takes [n, 1 to 32]"),
        }
        for shape, data, message in bad.values():
            body = {"name": "input_ids", "datatype": "INT64", "shape": shape, "data": data}
            reply = worker.public.post("/v2/models/topics/infer", json={"inputs": [body]})
            assert reply.status_code == 400
            assert message in reply.json()["error"]
        assert worker.public.get("/v2/models/topics").json()["inputs"][0]["shape"] == [-1, -1]
    assert expected.shape == (24, TOPICS)
