"""Data, texts, images, tokenizers and checkpoints that are broken or greedy: one line that says why, and no memory
without end."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import prepared
import pytest
from safetensors.numpy import save_file
from test_prepare_data import lines, tokenizer_file

from offramp_core.errors import InvalidArgumentError
from offramp_worker.prepare.families import build_family
from offramp_worker.prepare.source import texts
from offramp_worker.prepare.source.data import load_inputs
from offramp_worker.prepare.source.sources import load_backbone
from offramp_worker.preprocess.texts import load_tokenizer


def png(width: int, height: int) -> bytes:
    """An image that says it is that large, and holds nothing."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    packed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


IMAGES = {
    "billions of pixels": (png(60_000, 60_000), "not a readable image"),
    "more pixels than are read": (png(10_000, 10_000), r"10000x10000 pixels; at most 67108864 are read"),
    "no pixels": (png(4, 4), "not a readable image"),
    "another format under this name": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a readable image"),
}


@pytest.mark.parametrize("case", IMAGES)
def test_a_broken_or_huge_image_is_refused_by_name(case: str, tmp_path: Path) -> None:
    raw, message = IMAGES[case]
    (tmp_path / "a.png").write_bytes(raw)
    with pytest.raises(InvalidArgumentError, match=rf"a\.png.*{message}"):
        load_inputs(str(tmp_path))


LINES = {"nested without end": "[" * 100_000, "a number without end": "9" * 10_000, "half a character": '"\\ud800"'}


@pytest.mark.parametrize("case", LINES)
def test_a_line_that_json_cannot_hold_is_refused_by_name(case: str, tmp_path: Path) -> None:
    reader = load_tokenizer(tokenizer_file(tmp_path), most=4)
    with pytest.raises(InvalidArgumentError, match=r"line 2|cannot divide a text"):
        load_inputs(lines(tmp_path, '"a good film"', LINES[case]), texts=reader)


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_LINE", 1_000)
    reader = load_tokenizer(tokenizer_file(tmp_path), most=4)
    with pytest.raises(InvalidArgumentError, match="line 2 has more than 1000 characters"):
        load_inputs(lines(tmp_path, '"a good film"', '"' + "a" * 1_000 + '"'), texts=reader)


def edited_tokenizer(folder: Path, **fields: object) -> Path:
    file = tokenizer_file(folder)
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return file


def test_a_pattern_that_tries_without_end_is_given_up_on_by_name(tmp_path: Path) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    reader = load_tokenizer(edited_tokenizer(tmp_path, pre_tokenizer=pattern), most=8)
    with pytest.raises(InvalidArgumentError, match="the tokenizer cannot divide a text"):
        reader.encode(["a" * 200 + "b"])


def test_a_tokenizer_larger_than_any_vocabulary_is_not_read(tmp_path: Path) -> None:
    file = tokenizer_file(tmp_path)
    with file.open("ab") as opened:
        opened.truncate(2**34)  # sparse: it takes no disk
    with pytest.raises(InvalidArgumentError, match="17179869184 bytes; at most 268435456 are read"):
        load_tokenizer(file, most=4)


X = prepared.images(20, seed=4)[0]


def weights() -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in build_family("resnet", prepared.PARAMETERS).state_dict().items()}


def greedy(tensors: dict[str, np.ndarray]) -> None:
    """Shapes without any bytes of which a network would be made."""
    tensors["classifier.weight"] = np.zeros((2**40, 0), np.float32)
    tensors["vit.embeddings.patch_embeddings.projection.weight"] = np.zeros((768, 1, 4, 2**40, 0), np.float32)


CHECKPOINTS: dict[str, tuple[str, Callable[[dict[str, np.ndarray]], object]]] = {
    "a tensor too few": ("resnet", lambda tensors: tensors.popitem()),
    "a tensor of another shape": ("resnet", lambda t: t.update({n: v[None] for n, v in t.items()})),
    "no shape at all": ("bert", lambda t: t.update({"bert.embeddings.word_embeddings.weight": np.float32(1)})),
    "shapes that promise more than there is": ("vit", greedy),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_is_refused_before_memory_is_taken_for_it(case: str, tmp_path: Path) -> None:
    family, damage = CHECKPOINTS[case]
    tensors = weights()
    damage(tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, tmp_path / "w.safetensors")
    parameters = "&blocks=1&width=8&channels=1&classes=4" if family == "resnet" else "&heads=12"
    with pytest.raises(InvalidArgumentError, match=r"model weights"):
        load_backbone(f"family:{family}?weights={tmp_path / 'w.safetensors'}{parameters}", X)


def test_layers_as_wide_as_two_other_tensors_promise_take_no_memory_before_they_fit(tmp_path: Path) -> None:
    """Two small vectors can ask for a matrix of both: 4 TiB here."""
    tensors = weights() | {
        "bert.embeddings.word_embeddings.weight": np.zeros((1, 2**20), np.float32),
        "bert.encoder.layer.0.intermediate.dense.weight": np.zeros((2**20, 1), np.float32),
        "bert.embeddings.position_embeddings.weight": np.zeros((1, 1), np.float32),
        "bert.embeddings.token_type_embeddings.weight": np.zeros((1, 1), np.float32),
        "classifier.weight": np.zeros((2, 1), np.float32),
    }
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises(InvalidArgumentError, match=r"model weights .* do not fit family bert"):
        load_backbone(f"family:bert?weights={tmp_path / 'w.safetensors'}&heads=1", np.zeros((20, 8), np.int64))


CONFIGS = {
    "nested": "[" * 100_000,
    "a list": "[]",
    "a head of text": '{"num_attention_heads": "x"}',
    "no UTF-8": "\udcff",
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_beside_the_weights_is_read_as_carefully(case: str, tmp_path: Path) -> None:
    save_file({name: np.ascontiguousarray(value) for name, value in weights().items()}, tmp_path / "w.safetensors")
    (tmp_path / "config.json").write_bytes(CONFIGS[case].encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidArgumentError, match=r"config|hold no bert"):
        load_backbone(f"family:bert?weights={tmp_path / 'w.safetensors'}", X)


def test_inputs_without_rows_are_refused_like_too_few(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((0, 4), np.float32))
    assert load_inputs(str(tmp_path / "d.npz")).shape == (0, 4)
