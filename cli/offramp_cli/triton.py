"""``offramp triton``: a bundle and one of its plans as a model repository of Triton Inference Server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from offramp_cli.examples import with_examples
from offramp_cli.verify import load_plan
from offramp_core.errors import OfframpError
from offramp_core.plan import format_threshold

INVALID_INPUT = 2


@with_examples(
    "kubectl get rampconfig NAME -o yaml > plan.yaml && offramp triton bundle --plan plan.yaml --out models",
    "offramp triton bundle --plan better.yaml --out models --version 2",
)
def triton(
    bundle: Annotated[Path, typer.Argument(metavar="DIR", help="An exit bundle that `offramp prepare` wrote.")],
    *,
    plan: Annotated[Path, typer.Option(metavar="FILE", help="The plan: a RampConfig (YAML or JSON), or its spec.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The model repository; the model becomes a folder in it.")],
    name: Annotated[str, typer.Option(help="The model's name in Triton; the bundle's by default.")] = "",
    version: Annotated[
        int, typer.Option(help="The version directory. Others stay as they are, and so does config.pbtxt.", min=1)
    ] = 1,
) -> None:
    """Write a plan's exits into one ONNX graph, as a model repository that Triton Inference Server serves.

    Rows that exit at a ramp are not computed any further. In Triton nothing audits the plan or rolls it back.
    Exit code 2: the plan does not belong to the bundle, or a file cannot be read or exists already.
    """
    # The serving stack is the optional part `worker`; the other commands must not need it.
    from offramp_worker.bundle.load import load_bundle
    from offramp_worker.bundle.task import GENERATE, declared_task
    from offramp_worker.triton.repository import write_repository

    if declared_task(bundle) == GENERATE:
        _fail("the bundle is of a model that generates; those that classify can be exported")
    try:
        wanted, loaded = load_plan(plan), load_bundle(bundle)
        written = write_repository(loaded, wanted, out, name=name, version=version)
    except (OfframpError, OSError) as error:
        _fail(str(error))
    ramps = ", ".join(f"{r.id} < {format_threshold(r.threshold)}" for r in wanted.ramps if r.threshold > 0)
    print(f"{written.folder / str(version)}: {ramps or 'no exits'} at {wanted.precision}")
    print(f"{written.probe_left} of the bundle's {written.probe_rows} probe rows leave early")
    if written.missing_lines:
        print(f"{written.folder / 'config.pbtxt'} stays as it is; it does not say {', '.join(written.missing_lines)}")
    if loaded.encoded is not None:
        row, sent = loaded.manifest.inputs[0], loaded.asks_for.name
        print(f"clients send {row.name} {row.datatype} {list(row.shape)}, as the model takes it, not {sent}s")
    if wanted.tiers:
        print(f"tiers are left out: {', '.join(tier.name for tier in wanted.tiers)}")


def _fail(reason: str) -> NoReturn:
    print(f"error: {' '.join(reason.split())}", file=sys.stderr)
    raise typer.Exit(INVALID_INPUT)
