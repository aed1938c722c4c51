"""Named families all the way: a ``family:`` URI to a graph with places for exits, to a bundle, to a worker that answers
as the network does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import WorkerProcess
from safetensors.torch import save_file
from test_prepare_families import bert_shapes, checkpoint, distilbert_shapes, loaded, vit_shapes
from torch import nn
from torchvision.models import VGG

from offramp_worker.prepare import pipeline
from offramp_worker.prepare.heads.selection import CandidateVerdict, select_ramps
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.places.places import find_places
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.source.sources import load_backbone

pytestmark = pytest.mark.slow  # exports networks

ROWS, SEP = 240, 49  # SEP is in no row: each is one text
Array = np.ndarray[Any, Any]
ENCODERS = {"bert": bert_shapes, "minilm": bert_shapes, "distilbert": distilbert_shapes, "vit": vit_shapes}


def rows_for(name: str, n: int, *, size: int = 8) -> Array:
    rng = np.random.default_rng(3)
    if name in ENCODERS and name != "vit":
        ids = rng.integers(1, SEP, (n, 12))
        ids[np.arange(12) >= rng.integers(3, 13, (n, 1))] = 0
        return ids
    return rng.normal(size=(n, 3, size, size)).astype(np.float32)


def tokens(x: Array) -> dict[str, Any]:
    """Which ids mean what, where the rows are ids."""
    return {"pad": 0, "sep": SEP} if x.dtype.kind == "i" else {}


def encoder(name: str, folder: Path) -> tuple[str, torch.nn.Module]:
    tensors = checkpoint(ENCODERS[name]())
    save_file(tensors, folder / "weights.safetensors")
    return f"family:{name}?weights={folder / 'weights.safetensors'}&heads=3", loaded(name, tensors, {"heads": "3"})


class NarrowVGG(VGG):
    """VGG whose layers behind the features are 64 wide instead of 4,096: a hundredth of its half gigabyte of weights,
    and the same graph."""

    def __init__(self, features: nn.Module, num_classes: int = 1000, **_: Any) -> None:
        nn.Module.__init__(self)
        self.features, self.avgpool = features, nn.AdaptiveAvgPool2d((7, 7))
        widths = [(512 * 7 * 7, 64), (64, 64)]
        hidden = [layer for a, b in widths for layer in (nn.Linear(a, b), nn.ReLU(), nn.Dropout())]
        self.classifier = nn.Sequential(*hidden, nn.Linear(64, num_classes))


def network(name: str, folder: Path) -> tuple[str, torch.nn.Module]:
    from torchvision import models

    torch.manual_seed(0)
    reference = getattr(models, name)(weights=None, num_classes=7).eval()
    save_file(reference.state_dict(), folder / "weights.safetensors")
    return f"family:{name}?weights={folder / 'weights.safetensors'}", reference


def says(model: torch.nn.Module, x: Array) -> Array:
    values = torch.from_numpy(x)
    with torch.inference_mode():
        logits = model(values, (values != 0).long()) if x.dtype.kind == "i" else model(values)
    return np.asarray(logits.numpy())


@pytest.mark.parametrize(
    ("name", "make", "size"),
    [
        *((name, encoder, 8) for name in ENCODERS),
        ("mobilenet_v2", network, 64),
        ("densenet121", network, 64),
        ("vgg11_bn", network, 32),
    ],
    ids=[*ENCODERS, "mobilenet_v2", "densenet121", "vgg11_bn"],
)
def test_a_family_becomes_a_graph_with_places_for_exits(
    name: str,
    make: Callable[[str, Path], tuple[str, torch.nn.Module]],
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchvision.models.vgg.VGG", NarrowVGG)
    uri, model = make(name, tmp_path)
    x = rows_for(name, 4, size=size)
    backbone = load_backbone(uri, x, **tokens(x))
    found = find_places(backbone, x)
    assert found.n_cuts >= 2 and len(found.places) >= 2 and not found.exits
    assert backbone.output.shape == (says(model, x).shape[1],)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_family_is_prepared_and_served(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, model = encoder(name, tmp_path)
    x = rows_for(name, ROWS)
    np.savez(tmp_path / "data.npz", x=x)

    def all_of_them(
        merits: Any,
    ) -> list[CandidateVerdict]:  # with random weights in a tiny network it is chance what pays
        return [replace(verdict, refused="") for verdict in select_ramps(merits)]

    monkeypatch.setattr(pipeline, "select_ramps", all_of_them)
    request = PrepareRequest(
        model=uri,
        data=str(tmp_path / "data.npz"),
        out=tmp_path / "bundle",
        name="tiny",
        head_share=0.3,
        profile_seconds=0.2,
        precision="exact",
        compile_limit=0,
        **tokens(x),
    )
    report = prepare_bundle(request, Reporter(quiet=True))
    assert len(report.kept) >= 2
    with WorkerProcess(tmp_path / "bundle", control_plane=False) as worker:
        tensor = worker.public.get("/v2/models/tiny").json()["inputs"][0]
        for rows in (x[:1], x[1:6]):
            values = {
                "name": tensor["name"],
                "datatype": tensor["datatype"],
                "shape": list(rows.shape),
                "data": rows.ravel().tolist(),
            }
            reply = worker.public.post("/v2/models/tiny/infer", json={"inputs": [values]})
            assert reply.status_code == 200, reply.text
            logits = next(output for output in reply.json()["outputs"] if output["name"] == "logits")
            expected = says(model, rows)
            np.testing.assert_allclose(np.array(logits["data"]).reshape(expected.shape), expected, atol=2e-4)
