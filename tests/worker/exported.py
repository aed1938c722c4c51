"""A bundle and a plan through ``offramp triton``, and the repository as Triton's ONNX Runtime backend reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from typer.testing import CliRunner, Result

from offramp_cli.main import app
from offramp_core.plan import Plan

# What the backend calls a datatype, and what ONNX Runtime does.
TYPES = {
    model_config_pb2.TYPE_FP32: "tensor(float)",
    model_config_pb2.TYPE_INT64: "tensor(int64)",
    model_config_pb2.TYPE_UINT8: "tensor(uint8)",
}


def export(bundle: Path, plan: Plan, out: Path, *options: str) -> Result:
    """Run the command."""
    out.mkdir(parents=True, exist_ok=True)
    file = out.parent / f"{out.name}.plan.json"
    file.write_text(json.dumps(plan.to_mapping()))
    return CliRunner().invoke(app, ["triton", str(bundle), "--plan", str(file), "--out", str(out), *options])


@dataclass(frozen=True)
class Repository:
    """A model of it: its configuration, and a session as the backend opens one."""

    config: Any
    session: ort.InferenceSession

    @classmethod
    def of(cls, bundle: Path, plan: Plan, out: Path, *, options: ort.SessionOptions | None = None) -> Repository:
        result = export(bundle, plan, out)
        assert result.exit_code == 0, result.output
        (folder,) = out.iterdir()
        config = text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
        file = folder / "1" / config.default_model_filename
        found = cls(config, ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"]))
        found.check()
        return found

    def check(self) -> None:
        """What the backend checks as it loads a model: names, types, and shapes with the batch before them."""
        assert self.config.backend == "onnxruntime" and self.config.max_batch_size >= 1
        for told, has in (
            (self.config.input, self.session.get_inputs()),
            (self.config.output, self.session.get_outputs()),
        ):
            assert [tensor.name for tensor in told] == [tensor.name for tensor in has]
            for mine, own in zip(told, has, strict=True):
                assert own.type == TYPES[mine.data_type]
                dims = [size if isinstance(size, int) else -1 for size in own.shape]
                assert dims == [-1, *mine.dims], f"{mine.name}: {own.shape}"

    def answer(self, x: np.ndarray) -> tuple[dict[str, np.ndarray], list[str]]:
        """Outputs by name, and where each row left."""
        outputs = dict(zip((o.name for o in self.config.output), self.session.run(None, {self.entry: x}), strict=True))
        exits = [*self.told("exits"), "final"]  # -1 is the last one
        return outputs, [exits[place] for place in outputs.pop("exit")[:, 0]]

    def told(self, what: str) -> Any:
        """What the graph says of itself."""
        return json.loads(self.session.get_modelmeta().custom_metadata_map[f"offramp.{what}"])

    @property
    def entry(self) -> str:
        return str(self.config.input[0].name)
