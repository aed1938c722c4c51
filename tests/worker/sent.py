"""Images and texts as clients send them, and models that take what becomes of them."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
import prepared
import texts
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

CONFIG = {
    "do_resize": True,
    "size": {"shortest_edge": 20},
    "resample": 2,
    "do_center_crop": True,
    "crop_size": {"height": prepared.SIZE, "width": prepared.SIZE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5],
    "image_std": [0.125],
    "image_processor_type": "ViTImageProcessor",
}


def image(row: np.ndarray, *, form: str = "PNG", mode: str = "L", size: tuple[int, int] = (24, 20)) -> bytes:
    """A picture (1, h, w) of the tiny network's data, larger than it takes, as a file."""
    pixels = np.clip(np.rint(row[0] * 32 + 128), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR).convert(mode).save(out, form, quality=95)
    return out.getvalue()


def images(n: int, *, seed: int) -> list[bytes]:
    """PNG and JPEG by turns."""
    return [image(x, form=("PNG", "JPEG")[i % 2]) for i, x in enumerate(prepared.images(n, seed=seed)[0])]


def pixels(content: bytes) -> np.ndarray:
    """What the model is to read of an image, worked out apart from the code under test: (1, 16, 16) float32."""
    with Image.open(io.BytesIO(content)) as opened:
        gray = opened.convert("L")
    width, height = gray.size
    edge, size = CONFIG["size"]["shortest_edge"], prepared.SIZE
    new = (edge, int(edge * height / width)) if width <= height else (int(edge * width / height), edge)
    resized = np.asarray(gray.resize(new, Image.Resampling.BILINEAR), dtype=np.float32)
    top, left = round((resized.shape[0] - size) / 2), round((resized.shape[1] - size) / 2)
    return ((resized[top : top + size, left : left + size] / 255 - 0.5) / 0.125)[None].astype(np.float32)


def save_image_model(folder: Path) -> str:
    """The tiny network as a program, and the file beside it that says what goes before it."""
    x = torch.from_numpy(prepared.images(2, seed=1)[0])
    program = torch.export.export(prepared.trained_model(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, folder / "model.pt2")
    (folder / "preprocessor_config.json").write_text(json.dumps(CONFIG))
    return str(folder / "model.pt2")


def tokenizer() -> Tokenizer:
    words = {"[PAD]": texts.PAD} | {f"w{i}": i for i in range(1, texts.WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="w1"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def save_text_model(folder: Path) -> str:
    """The tiny network of attention, and a tokenizer of its words: w1, w2, ..."""
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    return str(texts.text_model(folder / "model.onnx"))


def sentences(n: int, *, seed: int) -> list[str]:
    return [" ".join(f"w{i}" for i in row[row != texts.PAD]) for row in texts.texts(n, seed=seed)]


def serialized(strings: list[bytes]) -> bytes:
    """The protocol's binary form."""
    return b"".join(struct.pack("<I", len(s)) + s for s in strings)
