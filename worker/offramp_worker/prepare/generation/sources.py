"""From ``--model`` to a checkpoint, whichever format it has."""

from __future__ import annotations

from pathlib import Path

from offramp_core.errors import InvalidArgumentError
from offramp_worker.prepare.generation.checkpoint import Checkpoint
from offramp_worker.prepare.generation.huggingface import CONFIG, read_huggingface
from offramp_worker.prepare.generation.llama2c import read_llama2c
from offramp_worker.prepare.source.locations import local_path

TAKEN = (
    "a folder with config.json, model.safetensors and tokenizer.json, a .gguf file, or llama2c's .bin with its "
    "tok*.bin beside it"
)


def read_checkpoint(uri: str) -> Checkpoint:
    """The checkpoint at a path.

    Raises
    ------
    InvalidArgumentError
        There is nothing there that could be one.
    ModelRefusedError
        It is one, and cannot be taken; names the field.
    """
    path = local_path(uri, field="model")
    if path.is_dir() and (path / CONFIG).is_file():
        return read_huggingface(path)
    if path.is_dir():
        path = _only(path)
    if not path.is_file():
        raise InvalidArgumentError(f"model {uri}: there is no such file; give {TAKEN}")
    if path.suffix == ".gguf":
        from offramp_worker.prepare.generation.gguf import read_gguf

        return read_gguf(path)
    if path.suffix == ".bin":
        words = sorted(path.parent.glob("tok*.bin"))
        if len(words) != 1:
            raise InvalidArgumentError(f"model {uri}: has {len(words)} files tok*.bin beside it; one is read")
        return read_llama2c(path, words[0])
    raise InvalidArgumentError(f"model {uri}: is none of the formats that are taken; give {TAKEN}")


def _only(folder: Path) -> Path:
    """The one file of weights in a folder."""
    found = [p for p in sorted(folder.glob("*.gguf")) or sorted(folder.glob("*.bin")) if not p.name.startswith("tok")]
    if len(found) != 1:
        raise InvalidArgumentError(f"model {folder}: holds {len(found)} checkpoints; give {TAKEN}")
    return found[0]
