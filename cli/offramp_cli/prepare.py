"""``offramp prepare``: turn a model and unlabelled inputs into an exit bundle."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from offramp_core.errors import InvalidArgumentError, OfframpError
from offramp_core.task import TASKS, TaskSpec, declared_spec

INVALID_INPUT = 2


def prepare(
    *,
    model: Annotated[
        str,
        typer.Option(
            help="family:NAME?weights=FILE.safetensors, a torch.export program (.pt2) or an .onnx file; a path or file:///PATH."
        ),
    ] = "",
    refresh: Annotated[
        Path | None,
        typer.Option(
            metavar="BUNDLE",
            help="Instead of --model: train the heads of this bundle again, on recent inputs. A new ramp set on the same backbone.",
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="Unlabelled inputs, oldest first: an .npz with x [N, ...], a folder of images, or JSON lines of text; a path or file:///PATH."
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of the bundle; an earlier bundle there, also the refreshed one, is replaced.")
    ],
    name: Annotated[str, typer.Option(help="Model name in the protocol.  [default: from the model]")] = "",
    head_data: Annotated[
        str, typer.Option(help="More inputs that only train heads, such as those the model was trained on.")
    ] = "",
    head_share: Annotated[
        float | None,
        typer.Option(help="Share of the data that trains heads.  [default: 0.1, doubled while that pays]"),
    ] = None,
    split: Annotated[
        str, typer.Option(help="Training to validation among the head rows: default (9:1) or apparate (1:9).")
    ] = "default",
    variations: Annotated[
        int, typer.Option(help="Shifted, slightly noisy copies of each image that trains heads.")
    ] = 0,
    side: Annotated[
        list[str] | None,
        typer.Option(help="A small model to put in front, a URI like --model's; may be given again."),
    ] = None,
    precision: Annotated[
        str, typer.Option(help="auto: int8 as well, where it is faster and disagrees little (CPUs); exact: fp32 alone.")
    ] = "auto",
    device: Annotated[
        str,
        typer.Option(help="Where the bundle is measured and will be served: cpu, cuda or webgpu. --refresh keeps it."),
    ] = "cpu",
    compile_limit: Annotated[
        float, typer.Option(help="Seconds torch.compile may take while executors are compared; 0 leaves it out.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same heads.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads of one worker; the profile is measured with them.")] = 1,
    tokenizer: Annotated[
        str, typer.Option(help="tokenizer.json that divides texts into tokens.  [default: the one beside the model]")
    ] = "",
    max_tokens: Annotated[int, typer.Option(help="Longer texts are cut to so many tokens.", min=2)] = 512,
    pad_id: Annotated[
        int | None, typer.Option(help="Token id that fills texts up.  [default: the tokenizer's, else 0]")
    ] = None,
    sep_id: Annotated[
        int | None, typer.Option(help="Token id that ends each text of a pair.  [default: the tokenizer's]")
    ] = None,
    own_exits: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Outputs of --model that are earlier exits of its own, in the network's order: all but the one that is served.",
        ),
    ] = "",
    task: Annotated[
        str,
        typer.Option(help=f"What the model does: {', '.join(TASKS)}. --refresh keeps the bundle's."),
    ] = "Top1",
    k: Annotated[int, typer.Option(help="TopK: how many classes an answer names.")] = 0,
    thresholds: Annotated[
        str,
        typer.Option(
            metavar="P,...",
            help="MultiLabel, Binary: a label is given above this probability, one for all or one for each.  [default: 0.5]",
        ),
    ] = "",
    loss: Annotated[
        str,
        typer.Option(
            help="What a different answer loses. Exact: everything. TopK: Overlap, the share of its classes that is missing. "
            "MultiLabel: Hamming, the share of labels that differ."
        ),
    ] = "Exact",
    measure: Annotated[
        str,
        typer.Option(
            help="Regression: absolute or relative. Embedding: cosine, absolute or relative.  [default: the first]"
        ),
    ] = "",
    tolerance: Annotated[
        float, typer.Option(help="Regression, Embedding: how far an answer may be from the model's, by --measure.")
    ] = 0.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Find exits in a model, train their heads, measure them and write an exit bundle.

    The bundle's folder also gets report.json, which --json prints, and report.png: what every ramp costs, who could leave there, and what
    plans could save.

    Examples:

      offramp prepare --model model.onnx --data inputs.npz --out bundle

      offramp prepare --refresh bundle --data recent.npz --out bundle-2
    """
    from rich.console import Console

    from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
    from offramp_worker.prepare.progress import Reporter
    from offramp_worker.prepare.refresh import refresh_bundle
    from offramp_worker.prepare.report import print_report

    if bool(model) == (refresh is not None):
        print("offramp prepare: give --model or --refresh, and not both", file=sys.stderr)
        raise typer.Exit(INVALID_INPUT)
    if refresh is not None and own_exits:
        print("offramp prepare: give --own-exits with --model; --refresh keeps the bundle's exits", file=sys.stderr)
        raise typer.Exit(INVALID_INPUT)
    declared = _declared(task, k=k, thresholds=thresholds, loss=loss, measure=measure, tolerance=tolerance)
    if refresh is not None and declared is not None:
        print("offramp prepare: give --task with --model; --refresh keeps the bundle's task", file=sys.stderr)
        raise typer.Exit(INVALID_INPUT)
    request = PrepareRequest(
        model=model or str(refresh), data=data, out=out, name=name, head_data=head_data, split=split,  # type: ignore[arg-type]
        head_share=head_share, variations=variations, seed=seed, threads=threads,
        sides=tuple(side or ()), precision=precision, device=device, compile_limit=compile_limit,  # type: ignore[arg-type]
        tokenizer=tokenizer, max_tokens=max_tokens, pad=pad_id, sep=sep_id,
        own_exits=tuple(own_exits.split(",")) if own_exits else (), task=declared,
    )  # fmt: skip
    try:
        report = (prepare_bundle if refresh is None else refresh_bundle)(request, Reporter())
    except OfframpError as error:
        print(f"offramp prepare: {error}", file=sys.stderr)
        raise typer.Exit(INVALID_INPUT) from error
    if json_output:
        print(json.dumps(report.to_mapping(), indent=2))
    else:
        print_report(report, Console())


def _declared(task: str, *, k: int, thresholds: str, loss: str, measure: str, tolerance: float) -> TaskSpec | None:
    """The task as it was declared; None for the top label."""
    try:
        numbers = tuple(float(part) for part in thresholds.split(",") if part)
    except ValueError:
        print(f"offramp prepare: thresholds is {thresholds!r}; give numbers such as 0.5,0.3", file=sys.stderr)
        raise typer.Exit(INVALID_INPUT) from None
    try:
        return declared_spec(task, k=k, thresholds=numbers, loss=loss, measure=measure, tolerance=tolerance)
    except InvalidArgumentError as error:
        print(f"offramp prepare: {error}", file=sys.stderr)
        raise typer.Exit(INVALID_INPUT) from error
