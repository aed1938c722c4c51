"""Architectures nobody tuned for: ``python -m bench.foreign [--only NAME...] [--out build/foreign]``; JSON on stdout.

A small VGG (.pt2), a small DenseNet (.onnx) and a small transformer (.onnx with a mask) are trained briefly, exported,
and given to ``offramp prepare`` with 2,000 unlabelled inputs and no other option; ``offramp serve`` then answers
held-out inputs, which must equal the model's own answers while exits are off. The best plan at 1 % on the bundle's
records is judged on these inputs too, which neither the model nor a head nor the plan has seen, and served. For a model
that is refused the optimum in hindsight is told, over all heads that were tried.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import torch
from torch import Tensor, nn

from bench.cifar.data import data_folder, load_images
from bench.digits.data import load_digit_sets
from bench.openloop import OpenLoopClient, Target, Trial, infer
from bench.provenance import provenance
from bench.validate_simulator import LoopbackWorker
from offramp_core.errors import ModelRefusedError
from offramp_core.evaluate import evaluate, evaluate_plan
from offramp_core.plan import Plan, RampThreshold
from offramp_core.records import Records, records_from_arrays
from offramp_core.search.placement import best_plan
from offramp_core.tuning import Proposed, TuningRequest, tune
from offramp_worker.bundle.lengths import by_length, pad_rows, used_length
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.prepare import pipeline
from offramp_worker.prepare.heads.selection import select_ramps
from offramp_worker.prepare.pipeline import PrepareRequest, read_inputs
from offramp_worker.prepare.progress import Reporter

BUDGET = 0.01
UNLABELLED = 2_000
SERVED = 200
TURNS = 4  # of exits off and on
SEED = 0
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Task:
    """Inputs by purpose: ``train`` with labels, ``stream`` for prepare, ``held_out`` to judge."""

    train: Array
    labels: npt.NDArray[np.int64]
    stream: Array
    held_out: Array


class Vgg(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Eight 3x3 convolutions in four groups, each halving the map (Simonyan and Zisserman 2015, arXiv:1409.1556)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (16, 32, 64, 96):
            for _ in range(2):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(4 * channels, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 32, 32) -> logits (B, 10)."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


class DenseNet(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Three blocks of five layers that each read all layers before (Huang et al. 2017, arXiv:1608.06993)."""

    def __init__(self, *, growth: int = 12, layers: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        channels = 16
        for _ in range(3):
            block = nn.ModuleList()
            for _ in range(layers):
                norm = nn.BatchNorm2d(channels)
                block.append(nn.Sequential(norm, nn.ReLU(), nn.Conv2d(channels, growth, 3, padding=1, bias=False)))
                channels += growth
            self.blocks.append(block)
            self.transitions.append(
                nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1))
            )
            channels //= 2
        self.classifier = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 24, 24) -> logits (B, 10)."""
        x = self.stem(x)
        for block, transition in zip(self.blocks, self.transitions, strict=True):
            parts = [x]
            for layer in block:
                parts.append(layer(torch.cat(parts, dim=1)))
            x = nn.functional.avg_pool2d(transition(torch.cat(parts, dim=1)), 2)
        logits: Tensor = self.classifier(x.mean(dim=(2, 3)))
        return logits


class Transformer(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """PyTorch's own encoder layers over words, averaged: four layers, width 96."""

    def __init__(self, *, words: int, classes: int, width: int = 96, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True) for _ in range(layers)
        )
        self.classifier = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T), (B, T) -> logits (B, classes)."""
        h = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            h = layer(h, src_key_padding_mask=attention_mask == 0)
        weight = attention_mask[..., None].to(h.dtype)
        logits: Tensor = self.classifier((h * weight).sum(dim=1) / weight.sum(dim=1))
        return logits


def vgg(folder: Path) -> tuple[Path, Task]:
    """The VGG on CIFAR-10."""
    images = load_images()
    labels = _cifar_labels("train0")
    rows = np.random.default_rng(SEED).permutation(len(images.test))
    stream, held_out = images.test[rows[:UNLABELLED]], images.test[rows[UNLABELLED:]]
    task = Task(images.train, labels, stream, held_out)
    path = folder / "vgg.pt2"
    if not path.is_file():
        model = train(Vgg(), task, epochs=3, rate=3e-3)
        batch = torch.export.Dim("batch")
        program = torch.export.export(model, (torch.from_numpy(stream[:2]),), dynamic_shapes=({0: batch},))
        torch.export.save(program, path)
    return path, task


def densenet(folder: Path) -> tuple[Path, Task]:
    """The DenseNet on scikit-learn's digits; shifted, noisy copies make up the numbers, never of one digit on both
    sides."""
    sets = load_digit_sets(seed=SEED)
    x, y = _varied(sets.backbone.x, sets.backbone.y, 3_000, seed=1)
    task = Task(
        x,
        y,
        _varied(sets.heads.x, sets.heads.y, UNLABELLED, seed=2)[0],
        _varied(sets.traffic.x, sets.traffic.y, 2_000, seed=3)[0],
    )
    path = folder / "densenet.onnx"
    if not path.is_file():
        model = train(DenseNet(), task, epochs=4, rate=3e-3)
        _save_onnx(model, (torch.from_numpy(task.stream[:2]),), ["pixels"], path)
    return path, task


def transformer(folder: Path) -> tuple[Path, Task]:
    """The transformer on AG News topics, over the words that are frequent in its training texts."""
    lines = (data_folder() / "nlp_agnews" / "agnews_dev.tsv").read_text(encoding="utf-8").splitlines()
    pairs = [line.rpartition("\t") for line in lines]
    order = np.random.default_rng(SEED).permutation(len(pairs))
    texts, topics = [pairs[i][0] for i in order], sorted({topic for _, _, topic in pairs})
    n = 6_000
    x = _word_ids(texts, vocabulary=texts[:n], size=8_000, length=48)
    labels = np.array([topics.index(pairs[i][2]) for i in order], dtype=np.int64)
    task = Task(x[:n], labels[:n], x[n : n + UNLABELLED], x[n + UNLABELLED :])
    path = folder / "transformer.onnx"
    if not path.is_file():
        model = train(Transformer(words=8_000, classes=4), task, epochs=2, rate=2e-3)
        ids = torch.from_numpy(task.stream[:2])
        _save_onnx(model, (ids, (ids != 0).long()), ["input_ids", "attention_mask"], path)
    return path, task


MODELS: Mapping[str, Callable[[Path], tuple[Path, Task]]] = {
    "vgg": vgg,
    "densenet": densenet,
    "transformer": transformer,
}


def train(model: nn.Module, task: Task, *, epochs: int, rate: float) -> nn.Module:
    """AdamW under a one-cycle schedule; the result is in evaluation mode."""
    torch.manual_seed(SEED)
    x, y = torch.from_numpy(task.train), torch.from_numpy(task.labels)
    tokens = x.dtype == torch.int64
    steps = epochs * (len(x) // 64)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps + 1)
    model.train()
    order = torch.cat([torch.randperm(len(x))[: len(x) // 64 * 64] for _ in range(epochs)])
    for rows in order.split(64):
        inputs = (x[rows], (x[rows] != 0).long()) if tokens else (x[rows],)
        loss = nn.functional.cross_entropy(model(*inputs), y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval()


def prepare(model: Path, data: Path, out: Path, options: Sequence[str] = ()) -> dict[str, Any]:
    """``offramp prepare``; its report, or why it refused."""
    command = [*_offramp("prepare"), "--model", str(model), "--data", str(data), "--out", str(out), "--json", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        return {"error": result.stderr.strip().splitlines()[-1]}
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def judge(name: str, folder: Path, x: Array, report: Mapping[str, Any]) -> dict[str, Any]:
    """What the best plan at 1 % on the bundle's records saves and disagrees on ``x``, and the optimum there in
    hindsight."""
    bundle = load_bundle(folder)
    recorded = records_from_arrays(dict(np.load(folder / "records.npz")))
    seen = held_out_records(bundle, recorded, x)
    plan = best_plan(recorded, max_disagreement=BUDGET).plan
    result, hindsight = evaluate(seen, plan.active, plan.thresholds), best_plan(seen, max_disagreement=BUDGET)
    return {
        "model": name,
        "places": report["places"],
        "ramps": [bundle.ramps[i].id for i in plan.active],
        "kept": [ramp.id for ramp in bundle.ramps],
        "records": len(recorded),
        "predicted_saving": round(best_plan(recorded, max_disagreement=BUDGET).value, 4),
        "held_out": len(seen),
        "saving": round(result.saving, 4),
        "disagreement": round(result.disagreement, 4),
        "hindsight_saving": round(hindsight.value, 4),
        "certified": _certified(bundle, recorded, seen),
    }


def _certified(bundle: Bundle, recorded: Records, seen: Records) -> dict[str, float] | None:
    """What the plan that tuning certifies at 1 % on the bundle's records does on ``seen``; None where none is
    certified."""
    manifest = bundle.manifest
    ids = tuple(ramp.id for ramp in bundle.ramps[: recorded.n_ramps])
    outcome = tune(
        recorded,
        TuningRequest(
            max_disagreement=BUDGET,
            delta=0.05,
            test_index=1,
            ramp_ids=ids,
            backbone_digest=manifest.backbone_digest,
            ramp_set_digest=manifest.ramp_set_digest,
            max_overhead=1.0,
        ),
    )
    if not isinstance(outcome, Proposed):
        return None
    result = evaluate_plan(seen, outcome.plan, ids)
    return {"saving": round(result.saving, 4), "disagreement": round(result.disagreement, 4)}


def held_out_records(bundle: Bundle, recorded: Records, x: Array) -> Records:
    """What every ramp at fp32 says about ``x``, as an audit of a worker would record it, at the recorded costs."""
    spec, sessions = bundle.manifest.inputs[0], Sessions(bundle, threads=1)
    uncertainty = np.empty((len(x), recorded.n_ramps), np.float32)
    prediction, reference = np.empty((len(x), recorded.n_ramps), np.int64), np.empty(len(x), np.int64)
    for rows in by_length(x, spec, size=32):
        scores = sessions.tapped(pad_rows([x[rows]], spec))
        columns = slice(recorded.n_ramps)  # the fp32 chain comes first
        uncertainty[rows], prediction[rows] = scores.uncertainty[:, columns], scores.prediction[:, columns]
        reference[rows] = scores.logits.argmax(axis=1)
    costs = recorded.costs
    return records_from_arrays(
        {
            "uncertainty": uncertainty,
            "prediction": prediction,
            "final": reference,
            "segment_seconds": np.asarray(costs.segment_seconds),
            "ramp_seconds": np.asarray(costs.ramp_seconds),
        }
    )


def refused(name: str, folder: Path, x: Array, *, reason: str, model: str, data: Path) -> dict[str, Any]:
    """Why a model was refused, and the optimum on ``x`` in hindsight over all heads that were tried, paying or not."""
    result: dict[str, Any] = {"model": name, "error": reason, "hindsight_saving": None}
    request = PrepareRequest(model=model, data=str(data), out=folder, precision="exact", compile_limit=0.0)
    try:  # the steps of prepare_bundle, without the one that refuses
        search = pipeline._begin(request, Reporter(quiet=True), read_inputs(request))
    except ModelRefusedError:
        return result  # there is no place to try a head at
    heads = pipeline._train(search)
    verdicts = [replace(verdict, refused="") for verdict in select_ramps(heads.fitted.merits(search.costs))]
    pipeline._finish(search, heads, verdicts, start=time.perf_counter())
    bundle = load_bundle(folder)
    seen = held_out_records(bundle, records_from_arrays(dict(np.load(folder / "records.npz"))), x)
    best = best_plan(seen, max_disagreement=BUDGET).value
    return result | {"heads_tried": len(bundle.ramps), "held_out": len(seen), "hindsight_saving": round(best, 4)}


def served(folder: Path, model: Path, x: Array) -> dict[str, Any]:
    """``offramp serve`` against the model's own file on ``x``: with exits off in requests of different sizes, where
    every answer must be the model's, then one by one with exits off and with the best plan of the bundle's records in
    turn."""
    bundle = load_bundle(folder)
    manifest, spec = bundle.manifest, bundle.manifest.inputs[0]
    recorded = records_from_arrays(dict(np.load(folder / "records.npz")))
    found = best_plan(recorded, max_disagreement=BUDGET).plan
    ramps = tuple(RampThreshold(bundle.ramps[i].id, t) for i, t in zip(found.active, found.thresholds, strict=True))
    off = Plan(manifest.backbone_digest, manifest.ramp_set_digest)
    rows = [_unpadded(x[i : i + 1], spec.pad) for i in range(len(x))]
    expected = np.array([int(own_answers(model, row).argmax()) for row in rows])
    with LoopbackWorker(folder) as worker:
        with httpx.Client(base_url=worker.url, timeout=60) as client:
            labels, gap = _compare(client, bundle, model, x)
        requests = [infer(row, model=manifest.name, input_name=spec.name) for row in rows]
        target = Target("offramp", int(worker.url.rpartition(":")[2]), requests, _label_and_leave)
        with OpenLoopClient(target) as client:
            trials: dict[str, list[Trial]] = {"off": [], "on": []}
            for seed in range(TURNS):
                for name, plan in (("off", off), ("on", replace(off, ramps=ramps, execution="Auto"))):
                    worker.put_in_force(plan)
                    client.one_by_one(10, seed=seed)
                    trials[name].append(client.one_by_one(len(x) // TURNS, seed=seed))
    ratios = [
        on.seconds.mean() / without.seconds.mean() for on, without in zip(trials["on"], trials["off"], strict=True)
    ]
    said = np.concatenate([trial.label for trial in trials["on"]])
    wrong = said // 2 != expected[np.concatenate([trial.row for trial in trials["on"]])]
    wrong_off = sum(int((trial.label // 2 != expected[trial.row]).sum()) for trial in trials["off"])
    return {
        "served": len(x),
        "labels_differ": labels + wrong_off,
        "largest_gap": round(gap, 6),
        "exits_on": {
            "requests": len(said),
            "left": round(float((said % 2).mean()), 4),
            "disagreement": round(float(wrong.mean()), 4),
            "latency_ratio": round(float(np.median(ratios)), 4),
        },
    }


def _label_and_leave(body: bytes) -> int:
    """Twice the label, and one more where the request left early."""
    reply = json.loads(body)
    label = next(output for output in reply["outputs"] if output["name"] == "label")["data"][0]
    return 2 * int(label) + (reply["parameters"]["exit"] != "final")


def _unpadded(rows: Array, pad: int | None) -> Array:
    """Token rows without the padding of the file, as a client would send them."""
    if pad is None or rows.dtype != np.int64:
        return rows
    return np.ascontiguousarray(rows[:, : used_length(rows, pad=pad)])


def _compare(client: httpx.Client, bundle: Bundle, model: Path, x: Array) -> tuple[int, float]:
    name = bundle.manifest.name
    tensor = client.get(f"/v2/models/{name}").raise_for_status().json()["inputs"][0]
    differ, gap = 0, 0.0
    for size, start in ((1, 0), (3, 1), (8, 4), (len(x) - 12, 12)):
        rows = _unpadded(x[start : start + size], bundle.manifest.inputs[0].pad)
        body = {
            "name": tensor["name"],
            "datatype": tensor["datatype"],
            "shape": list(rows.shape),
            "data": rows.ravel().tolist(),
        }
        reply = client.post(f"/v2/models/{name}/infer", json={"inputs": [body]}).raise_for_status().json()
        outputs = {output["name"]: output for output in reply["outputs"]}
        logits = np.array(outputs["logits"]["data"], dtype=np.float32).reshape(outputs["logits"]["shape"])
        expected = own_answers(model, rows)
        differ += int((logits.argmax(axis=1) != expected.argmax(axis=1)).sum())
        gap = max(gap, float(np.abs(logits - expected).max()))
    return differ, gap


def own_answers(model: Path, x: Array) -> npt.NDArray[np.float32]:
    """The model's own file, run by the library it was made for."""
    return _own(model)(x)


@cache
def _own(model: Path) -> Callable[[Array], npt.NDArray[np.float32]]:
    if model.suffix == ".onnx":
        session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        names = [each.name for each in session.get_inputs()]
        return lambda x: np.asarray(
            session.run(None, dict(zip(names, (x, (x != 0).astype(np.int64)), strict=False)))[0]
        )
    module = torch.export.load(model).module()

    def run(x: Array) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            return np.asarray(module(torch.from_numpy(x)).numpy(), dtype=np.float32)

    return run


def _offramp(command: str) -> list[str]:
    return [sys.executable, "-m", "offramp_cli", command]


def _save_onnx(model: nn.Module, arguments: tuple[Tensor, ...], names: list[str], path: Path) -> None:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", min=2, max=64)
    shapes = ({0: batch, 1: length},) * 2 if len(arguments) == 2 else ({0: batch},)
    torch.onnx.export(
        model,
        arguments,
        str(path),
        input_names=names,
        output_names=["scores"],
        dynamic_shapes=shapes,
        dynamo=True,
        external_data=False,
    )


def _cifar_labels(part: str) -> npt.NDArray[np.int64]:
    return np.loadtxt(
        data_folder() / "img_cifar10" / f"cifar10_{part}_labels.csv.gz",
        delimiter=",",
        dtype=np.int64,
        skiprows=1,
        usecols=1,
    )


def _varied(x: Array, y: Array, n: int, *, seed: int) -> tuple[Array, Array]:
    """``n`` copies of the images, each shifted by up to two pixels, with noise."""
    rng = np.random.default_rng(seed)
    rows = np.resize(rng.permutation(len(x)), n)
    padded = np.pad(x[rows], ((0, 0), (0, 0), (2, 2), (2, 2)))
    shifts = rng.integers(0, 5, size=(n, 2))
    size = x.shape[2]
    out = np.stack(
        [image[:, top : top + size, left : left + size] for image, (top, left) in zip(padded, shifts, strict=True)]
    )
    return (out + rng.normal(0, 0.08, out.shape)).astype(np.float32), y[rows]


def _word_ids(texts: Sequence[str], *, vocabulary: Sequence[str], size: int, length: int) -> npt.NDArray[np.int64]:
    """Frequent words by rank from 2; 1 is any other word, 0 fills up."""
    counts: dict[str, int] = {}
    for text in vocabulary:
        for word in text.lower().split():
            counts[word] = counts.get(word, 0) + 1
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]
    ids = {word: index for index, word in enumerate(ranked, start=2)}
    rows = np.zeros((len(texts), length), dtype=np.int64)
    for row, text in zip(rows, texts, strict=True):
        found = [ids.get(word, 1) for word in text.lower().split()[:length]]
        row[: len(found)] = found
    return rows


def measured(name: str, folder: Path) -> dict[str, Any]:
    """One of :data:`MODELS`, from its training to the served answers."""
    folder.mkdir(parents=True, exist_ok=True)
    model, task = MODELS[name](folder)
    stream = folder / "stream.npz"
    np.savez(stream, x=task.stream)
    report = prepare(model, stream, folder / "bundle")
    if "error" in report:
        return refused(name, folder / "all-heads", task.held_out, reason=report["error"], model=str(model), data=stream)
    return judge(name, folder / "bundle", task.held_out, report) | served(
        folder / "bundle", model, task.held_out[:SERVED]
    )


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="bench.foreign", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/foreign"))
    parser.add_argument("--only", nargs="*", choices=sorted(MODELS), default=list(MODELS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = []
    for name in options.only:
        with redirect_stdout(sys.stderr):  # torch tells there how its export goes
            results.append({**measured(name, options.out / name), "measured": provenance()})
        print(json.dumps(results[-1]), file=sys.stderr)
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
