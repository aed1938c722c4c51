"""The folder that Triton serves: a model's configuration and its graph, checked with ONNX Runtime before anything is
written."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_core.plan import Plan
from offramp_core.precision import EXACT
from offramp_worker.bundle.graph import input_name
from offramp_worker.bundle.load import Bundle
from offramp_worker.bundle.tensors import closed_options
from offramp_worker.engine.execution.sessions import reproduces
from offramp_worker.plans.preparation import check_fits
from offramp_worker.triton.config import MODEL_FILE, config_text, has_tensors
from offramp_worker.triton.graph import AT_THE_END, active_ramps, exit_graph, outputs_of

NAME = re.compile(r"[A-Za-z0-9][-._A-Za-z0-9]*")
CONFIG_FILE = "config.pbtxt"
UNFINISHED = ".offramp-"


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: the folder of the model, and how many rows of the bundle's probe leave early there."""

    folder: Path
    #: What a configuration that was there already, and stays, does not say.
    missing_lines: tuple[str, ...]
    probe_rows: int
    probe_left: int


def write_repository(bundle: Bundle, plan: Plan, out: Path, *, name: str = "", version: int = 1) -> Written:
    """Write a model with the plan's exits into the model repository ``out``.

    Parameters
    ----------
    name : str
        Of the model in Triton; the bundle's own by default.
    version : int
        The version directory, >= 1. Others that are there stay, and Triton serves the highest by default. So does the
        configuration, which is one of all versions and may have been edited.

    Raises
    ------
    InvalidArgumentError, PlanRefusedError
        The plan is none of this bundle or has no exits; that version is there already; or the model's configuration is
        of other inputs or outputs.
    InvalidBundleError
        The graph does not say of the bundle's probe what the model says.
    OSError
        The folder cannot be written.
    """
    name = name or bundle.manifest.name
    if not NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"name {name!r} cannot be a folder of a model repository; give letters, digits, '-', '_' and '.'"
        )
    manifest = bundle.manifest
    check_fits(
        plan,
        backbone_digest=manifest.backbone_digest,
        precisions=[spec.name for spec in manifest.backbones],
        columns=bundle.columns,
    )
    if active_ramps(plan) and plan.ramp_set_digest != manifest.ramp_set_digest:
        raise InvalidArgumentError(
            f"rampSetDigest is {plan.ramp_set_digest}, and this bundle's is {manifest.ramp_set_digest}; heads that "
            "were trained on live traffic are not in a bundle"
        )
    if plan.exits_off:
        raise InvalidArgumentError(
            "the plan has no exits, so there is nothing to export: Triton serves the bundle's backbone.onnx as it is"
        )
    folder = out / name
    if (folder / str(version)).exists():
        raise InvalidArgumentError(f"{folder / str(version)} exists; give another --version, or remove it")
    config = config_text(
        name=name,
        inputs=manifest.inputs,
        outputs=outputs_of(bundle),
        max_batch=bundle.profile.batches[-1].batch_size,
        on_gpu=not bundle.device.is_cpu,
    )
    missing_lines = _missing_lines(folder / CONFIG_FILE, config, bundle)
    model = exit_graph(bundle, plan)
    left = _checked(bundle, plan, model)
    _write(folder, str(version), model, config)
    return Written(folder, missing_lines, len(bundle.probe_x), left)


def _missing_lines(file: Path, config: str, bundle: Bundle) -> tuple[str, ...]:
    """Lines of a configuration that the one which is there has not; raises where that one is of other tensors."""
    if not file.exists():
        return ()
    there = file.read_text(errors="replace")
    if not has_tensors(there, inputs=bundle.manifest.inputs, outputs=outputs_of(bundle)):
        raise InvalidArgumentError(
            f"{file} does not have the inputs and outputs of this version as they are written here, and all versions "
            "of a model share it; give another --name, or remove that file where no version needs it"
        )
    present = {line.strip() for line in there.splitlines()}
    return tuple(line for line in config.splitlines() if line.strip() not in present)


def _checked(bundle: Bundle, plan: Plan, model: onnx.ModelProto) -> int:
    """How many of the probe's rows leave early, once the others are answered as the model answers them."""
    try:
        options = closed_options()
        options.log_severity_level = 3
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        answers = session.run(None, {input_name(bundle.backbone): bundle.probe_x})
    except Exception as error:  # ONNX Runtime raises bare exceptions of its C++ side, protobuf those of its own
        reason = str(error).partition("\n")[0]
        raise InvalidBundleError(f"the plan as one graph does not run: {reason}") from error
    stayed = answers[-1][:, 0] == AT_THE_END
    compared = plan.precision == EXACT and bool(stayed.any())
    if compared and not reproduces(answers[0][stayed], bundle.probe_logits[stayed], bundle.task):
        raise InvalidBundleError("the plan as one graph does not reproduce the logits of probe.npz on this machine")
    return int(np.count_nonzero(~stayed))


def _write(folder: Path, version: str, model: onnx.ModelProto, config: str) -> None:
    """Triton may be looking: it finds the version by one rename, and its configuration before that. What is not
    finished is in the model's folder, where Triton ignores all names that are no number."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{UNFINISHED}{version}-*"):
        shutil.rmtree(left)
    work = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}{version}-", dir=folder))
    try:
        (work / version).mkdir()
        (work / version / MODEL_FILE).write_bytes(model.SerializeToString())
        if not (folder / CONFIG_FILE).exists():
            (work / CONFIG_FILE).write_text(config)
            (work / CONFIG_FILE).replace(folder / CONFIG_FILE)
        (work / version).replace(folder / version)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(work)
            folder.rmdir()  # only where nothing came to be in it
