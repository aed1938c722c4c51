"""``offramp prepare``: turn a model and unlabeled inputs into an exit bundle."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from offramp_cli.examples import with_examples
from offramp_core.errors import InvalidArgumentError, OfframpError
from offramp_core.task import TASKS, TaskSpec, declared_spec
from offramp_worker.bundle.task import GENERATE

if TYPE_CHECKING:  # torch takes seconds to import
    from offramp_worker.prepare.pipeline import PrepareRequest
    from offramp_worker.prepare.report import PrepareReport

INVALID_INPUT = 2
#: Options that are handed on as they are with ``--task generate``; of the others it takes a few more.
OF_GENERATION = ("model", "data", "out", "name", "threads", "answer_tokens")
TAKEN_TO_REMEASURE = ("remeasure", "data", "out", "device", "threads", "json_output")
TAKEN_BY_GENERATION = (*OF_GENERATION, "task", "max_tokens", "vllm", "json_output")


# The options, in the order of the help.
ModelOption = Annotated[
    str,
    typer.Option(
        help="family:NAME?weights=FILE.safetensors, a torch.export program (.pt2) or an .onnx file; a path or "
        "file:///PATH. "
        "--task generate: a folder as transformers saves it, a .gguf file or llama2c's .bin."
    ),
]
RefreshOption = Annotated[
    Path | None,
    typer.Option(
        metavar="BUNDLE",
        help="Instead of --model: train the heads of this bundle again, on recent inputs. A new ramp set on the same "
        "backbone.",
    ),
]
RemeasureOption = Annotated[
    Path | None,
    typer.Option(
        metavar="BUNDLE",
        help="Instead of --model: measure this bundle on --device of this machine. Model and heads stay, so that pools "
        "of a service with either bundle run the same plans.",
    ),
]
DataOption = Annotated[
    str,
    typer.Option(
        help="Unlabeled inputs, oldest first: an .npz with x [N, ...], a folder of images, or JSON lines of text; a "
        "path or file:///PATH. "
        "--task generate: JSON lines of prompts."
    ),
]
OutOption = Annotated[
    Path, typer.Option(help="Folder of the bundle; an earlier bundle there, also the refreshed one, is replaced.")
]
NameOption = Annotated[str, typer.Option(help="Model name in the protocol.  [default: from the model]")]
HeadDataOption = Annotated[
    str, typer.Option(help="More inputs that only train heads, such as those the model was trained on.")
]
HeadShareOption = Annotated[
    float | None, typer.Option(help="Share of the data that trains heads.  [default: 0.1, doubled while that pays]")
]
SplitOption = Annotated[
    str, typer.Option(help="Training to validation among the head rows: default (9:1) or apparate (1:9).")
]
VariationsOption = Annotated[int, typer.Option(help="Shifted, slightly noisy copies of each image that trains heads.")]
SideOption = Annotated[
    list[str] | None, typer.Option(help="A small model at the input, in the form of --model; may be given again.")
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        help="auto: int8 (CPUs) or fp16 (GPUs) as well, where it is faster and disagrees little; exact: fp32 alone."
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="Where the bundle is measured and will be served: cpu, cuda, cuda-tf32 (whose reference rounds) or "
        "webgpu. --refresh keeps it."
    ),
]
CompileLimitOption = Annotated[
    float, typer.Option(help="Seconds torch.compile may take while executors are compared; 0 leaves it out.")
]
SeedOption = Annotated[int, typer.Option(help="The same seed gives the same heads.")]
ThreadsOption = Annotated[int, typer.Option(help="CPU threads of one worker; the profile is measured with them.")]
TokenizerOption = Annotated[
    str, typer.Option(help="tokenizer.json that divides texts into tokens.  [default: the one beside the model]")
]
MaxTokensOption = Annotated[int, typer.Option(help="Longer texts are cut to so many tokens.", min=2)]
EncodedOption = Annotated[
    bool,
    typer.Option(
        "--encoded",
        help="Clients send images (JPEG, PNG) or texts, as --data holds them; what makes the model's input of them "
        "goes into the bundle.",
    ),
]
PreprocessorOption = Annotated[
    str,
    typer.Option(
        help="With --encoded: preprocessor_config.json that says how images are resized and scaled.  [default: the one "
        "beside the model]"
    ),
]
PadIdOption = Annotated[int | None, typer.Option(help="Token id that pads texts.  [default: the tokenizer's, else 0]")]
SepIdOption = Annotated[
    int | None, typer.Option(help="Token id that ends each text of a pair.  [default: the tokenizer's]")
]
OwnExitsOption = Annotated[
    str,
    typer.Option(
        metavar="NAME,...",
        help="Outputs of --model that are earlier exits of its own, in the network's order: all but the one that is "
        "served.",
    ),
]
TaskOption = Annotated[
    str, typer.Option(help=f"What the model does: {', '.join(TASKS)} or {GENERATE}. --refresh keeps the bundle's.")
]
AnswerTokensOption = Annotated[
    int, typer.Option(help="--task generate: how long the answers are that variants and drafts are compared on.")
]
VllmOption = Annotated[
    Path | None,
    typer.Option(
        "--vllm",
        metavar="FILE",
        help="--task generate: vLLM computes the model, started in each of the configurations that this YAML lists. "
        "OFFRAMP_VLLM_PYTHON names a Python that has it.",
    ),
]
KOption = Annotated[int, typer.Option(help="TopK: how many classes an answer names.")]
ThresholdsOption = Annotated[
    str,
    typer.Option(
        metavar="P,...",
        help="MultiLabel, Binary: a label is given above this probability, one for all or one for each.  [default: "
        "0.5]",
    ),
]
LossOption = Annotated[
    str,
    typer.Option(
        help="What a different answer loses. Exact: everything. TopK: Overlap, the share of its classes that is "
        "missing. "
        "MultiLabel: Hamming, the share of labels that differ."
    ),
]
MeasureOption = Annotated[
    str,
    typer.Option(
        help="Regression: absolute or relative. Embedding: cosine, absolute or relative.  [default: the first]"
    ),
]
ToleranceOption = Annotated[
    float, typer.Option(help="Regression, Embedding: how far an answer may be from the model's, by --measure.")
]
VariantsOption = Annotated[
    bool,
    typer.Option(
        "--variants",
        help="Also try cheaper forms of the model: low rank, fewer channels, fewer blocks, each trained on the model's "
        "own answers, in fp32 and int8. The bundle keeps those that save time here. Can be stopped and resumed.",
    ),
]
VariantSecondsOption = Annotated[float, typer.Option(help="With --variants: seconds to train each of them.")]
JsonOutputOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


@with_examples(
    "offramp prepare --model model.onnx --data inputs.npz --out bundle",
    "offramp prepare --model model.onnx --data inputs.npz --variants --out bundle",
    "offramp prepare --refresh bundle --data recent.npz --out bundle-2",
    "offramp prepare --remeasure bundle --device cuda --data inputs.npz --out bundle-cuda",
    "offramp prepare --task generate --model model.gguf --data prompts.jsonl --out bundle",
    "offramp prepare --task generate --model checkpoint --vllm vllm.yaml --data prompts.jsonl --out bundle",
)
def prepare(
    *,
    context: typer.Context,
    model: ModelOption = "",
    refresh: RefreshOption = None,
    remeasure: RemeasureOption = None,
    data: DataOption,
    out: OutOption,
    name: NameOption = "",
    head_data: HeadDataOption = "",
    head_share: HeadShareOption = None,
    split: SplitOption = "default",
    variations: VariationsOption = 0,
    side: SideOption = None,
    precision: PrecisionOption = "auto",
    device: DeviceOption = "cpu",
    compile_limit: CompileLimitOption = 60.0,
    seed: SeedOption = 0,
    threads: ThreadsOption = 1,
    tokenizer: TokenizerOption = "",
    max_tokens: MaxTokensOption = 512,
    encoded: EncodedOption = False,
    preprocessor: PreprocessorOption = "",
    pad_id: PadIdOption = None,
    sep_id: SepIdOption = None,
    own_exits: OwnExitsOption = "",
    task: TaskOption = "Top1",
    k: KOption = 0,
    thresholds: ThresholdsOption = "",
    loss: LossOption = "Exact",
    measure: MeasureOption = "",
    tolerance: ToleranceOption = 0.0,
    answer_tokens: AnswerTokensOption = 64,
    vllm: VllmOption = None,
    variants: VariantsOption = False,
    variant_seconds: VariantSecondsOption = 120.0,
    json_output: JsonOutputOption = False,
) -> None:
    """Find exits in a model, train their heads, measure them and write an exit bundle.

    The bundle's folder also gets report.json, which --json prints, and report.png: what every ramp costs, how many
    inputs could exit there, and what plans could save.
    """
    if remeasure is not None:
        _refuse_others(context, TAKEN_TO_REMEASURE, "--remeasure")
        _remeasure(context.params)
        return
    if task == GENERATE:
        _refuse_others(context, TAKEN_BY_GENERATION, f"--task {GENERATE}")
        _generate(context.params)
        return
    if vllm is not None:
        _refuse(f"--vllm belongs to models that generate; add --task {GENERATE}")
    declared = _declared(task, k=k, thresholds=thresholds, loss=loss, measure=measure, tolerance=tolerance)
    _check_source(model, refresh, own_exits, declared, encoded=encoded, variants=variants)
    report = _prepared(_request(context.params, declared), refresh=refresh is not None)
    if json_output:
        print(json.dumps(report.to_mapping(), indent=2))
    else:
        _print(report)


def _request(given: dict[str, Any], task: TaskSpec | None) -> PrepareRequest:
    from offramp_worker.prepare.pipeline import PrepareRequest

    own = {
        "model": given["model"] or str(given["refresh"]),
        "sides": tuple(given["side"] or ()),
        "pad": given["pad_id"],
        "sep": given["sep_id"],
        "own_exits": tuple(given["own_exits"].split(",")) if given["own_exits"] else (),
        "task": task,
    }
    as_given = {field.name: given[field.name] for field in fields(PrepareRequest) if field.name in given}
    return PrepareRequest(**(as_given | own))


def _refuse_others(context: typer.Context, taken: Collection[str], given: str) -> None:
    """An option that says nothing beside another one."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in taken and source is not None and source.name == "COMMANDLINE":
            _refuse(f"--{name.replace('_', '-')} belongs to other tasks; leave it out with {given}")


def _generate(given: Mapping[str, Any]) -> None:
    """``--task generate``, by the worker's own engine or by vLLM."""
    make = _generation if given["vllm"] is None else partial(_vllm, given["vllm"])
    asked = {name: given[name] for name in OF_GENERATION}
    make(prompt_tokens=given["max_tokens"], json_output=given["json_output"], **asked)


def _remeasure(given: Mapping[str, Any]) -> None:
    """``--remeasure BUNDLE``."""
    from offramp_worker.prepare.pipeline import PrepareRequest
    from offramp_worker.prepare.progress import Reporter
    from offramp_worker.prepare.remeasure import remeasure_bundle

    try:
        asked = {name: given[name] for name in ("data", "out", "device", "threads")}
        report = remeasure_bundle(PrepareRequest(model=str(given["remeasure"]), **asked), Reporter())
    except OfframpError as error:
        _refuse(str(error), error)
    if given["json_output"]:
        print(json.dumps(report.to_mapping(), indent=2))
        return
    before, now = report.before, report.now
    print(f"{report.out}: the same model and exits, measured with {now.executor}, --threads {now.threads}")
    for batch in now.batches:
        here, there = (1000 * profile.at(batch.batch_size).exact_seconds for profile in (now, before))
        print(f"  {batch.batch_size} rows: {here:.3g} ms; {there:.3g} with {before.executor}")
    print(f"name it in the model.uri of a pool; spec.model.digest, for all pools, is {report.backbone_digest}")


def _generation(*, json_output: bool, **asked: Any) -> None:
    """``--task generate``."""
    from rich.console import Console

    from offramp_worker.prepare.generation.pipeline import GenerationRequest, prepare_generation
    from offramp_worker.prepare.generation.report import print_report
    from offramp_worker.prepare.progress import Reporter

    if not asked["model"]:
        _refuse("give --model")
    try:
        report = prepare_generation(GenerationRequest(**asked), Reporter())
    except OfframpError as error:
        _refuse(str(error), error)
    if json_output:
        print(json.dumps(asdict(report), indent=2))
    else:
        print_report(report, Console())


def _vllm(file: Path, *, json_output: bool, model: str, **asked: Any) -> None:
    """``--task generate --vllm FILE``."""
    from rich.console import Console

    from offramp_worker.generate.settings import vllm_settings
    from offramp_worker.logs import route_library_logs
    from offramp_worker.prepare.generation.vllm import VllmRequest, prepare_vllm, print_vllm_report
    from offramp_worker.prepare.progress import Reporter

    route_library_logs()
    try:
        here = str(Path(model).resolve()) if model and "://" not in model else model
        request = VllmRequest(_listed(file), file.resolve().parent, model=here, **asked)
        report = prepare_vllm(request, Reporter(), settings=vllm_settings(os.environ))
    except OfframpError as error:
        _refuse(str(error), error)
    if json_output:
        print(json.dumps(asdict(report), indent=2))
    else:
        print_vllm_report(report, Console())


def _listed(file: Path) -> dict[str, Any]:
    """What a file of configurations says."""
    import yaml

    from offramp_cli.documents import documents

    try:
        found = [one.value for one in documents(file.read_text())]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        _refuse(f"--vllm {file} cannot be read: {error}", error)
    if len(found) != 1 or not isinstance(found[0], dict):
        _refuse(f"--vllm {file} must be one YAML document with `configurations`")
    return found[0]


def _declared(task: str, *, k: int, thresholds: str, loss: str, measure: str, tolerance: float) -> TaskSpec | None:
    """The task as it was declared; None for the top label."""
    try:
        numbers = tuple(float(part) for part in thresholds.split(",") if part)
    except ValueError:
        _refuse(f"thresholds is {thresholds!r}; give numbers such as 0.5,0.3")
    try:
        return declared_spec(task, k=k, thresholds=numbers, loss=loss, measure=measure, tolerance=tolerance)
    except InvalidArgumentError as error:
        _refuse(str(error), error)


def _check_source(
    model: str, refresh: Path | None, own_exits: str, declared: TaskSpec | None, *, encoded: bool, variants: bool
) -> None:
    if bool(model) == (refresh is not None):
        _refuse("give --model or --refresh, and not both")
    if refresh is not None and own_exits:
        _refuse("give --own-exits with --model; --refresh keeps the bundle's exits")
    if refresh is not None and declared is not None:
        _refuse("give --task with --model; --refresh keeps the bundle's task")
    if refresh is not None and encoded:
        _refuse("give --encoded with --model; --refresh keeps what the bundle takes")
    if refresh is not None and variants:
        _refuse("give --variants with --model; --refresh keeps the bundle's")


def _prepared(request: PrepareRequest, *, refresh: bool) -> PrepareReport:
    from offramp_worker.prepare.pipeline import prepare_bundle
    from offramp_worker.prepare.progress import Reporter
    from offramp_worker.prepare.refresh import refresh_bundle

    try:
        return (refresh_bundle if refresh else prepare_bundle)(request, Reporter())
    except OfframpError as error:
        _refuse(str(error), error)


def _print(report: PrepareReport) -> None:
    from rich.console import Console

    from offramp_worker.prepare.report import print_report

    print_report(report, Console())


def _refuse(why: str, cause: Exception | None = None) -> NoReturn:
    print(f"offramp prepare: {why}", file=sys.stderr)
    raise typer.Exit(INVALID_INPUT) from cause
