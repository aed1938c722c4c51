"""Which variants are tried, and how each is made: edits of the reference's graph, then a stated time of learning.

Finished variants wait in a folder beside the bundle until the bundle is written, so that ``prepare`` can be stopped and
started again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from offramp_core.errors import InvalidArgumentError
from offramp_worker.bundle.graph import output_name, tensor_values
from offramp_worker.bundle.lengths import pad_rows
from offramp_worker.devices import open_session
from offramp_worker.prepare.places.cuts import Place
from offramp_worker.prepare.precision.folding import folded, tidied
from offramp_worker.prepare.precision.mixing import error_variance
from offramp_worker.prepare.progress import Advance, Reporter
from offramp_worker.prepare.source.data import InputArray
from offramp_worker.prepare.source.sources import Backbone
from offramp_worker.prepare.variants.layers import Floats, input_moments, layers_of
from offramp_worker.prepare.variants.lowrank import low_rank
from offramp_worker.prepare.variants.pruning import pruned
from offramp_worker.prepare.variants.shallow import Block, blocks_of, without_blocks

STUDIED_ROWS = 128
COMPARED_ROWS = 48  # of them, for what leaving a block out changes
CLOSE = 1e-3  # of the largest answer
GENERATION = 3  # of this code: what an earlier one left behind is made again
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is left out of the model: a share of its blocks, a share of the channels inside of blocks, what lies beyond
    an ``energy`` of each layer's outputs; 0 and 1 leave out nothing."""

    name: str
    blocks: float = 0.0
    channels: float = 0.0
    energy: float = 1.0


#: From cautious to bold.
RECIPES = (
    Recipe("lowrank99", energy=0.99),
    Recipe("lowrank95", energy=0.95),
    Recipe("pruned25", channels=0.25),
    Recipe("pruned50", channels=0.5),
    Recipe("shallow25", blocks=0.25),
    Recipe("shallow50", blocks=0.5),
    Recipe("shallow75", blocks=0.75),
    Recipe("small", blocks=0.75, channels=0.5),
)


@dataclass(frozen=True, slots=True)
class Made:
    """A variant: ``model`` is None where the recipe does not fit the model, which ``refused`` says."""

    name: str
    method: str
    model: onnx.ModelProto | None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Studio:
    """What variants are made of and with.

    ``rows`` (n, ...) are those they learn from and ``unseen`` (m, ...) those that tell which of their states is best,
    ``places`` all of the network, ``read`` the tensors that ramps read.
    """

    backbone: Backbone
    places: tuple[Place, ...]
    read: tuple[str, ...]
    rows: InputArray
    unseen: InputArray
    seconds: float
    seed: int
    threads: int
    folder: Path
    reporter: Reporter


def make_variants(studio: Studio, recipes: Sequence[Recipe]) -> tuple[Made, ...]:
    """Make a variant by every recipe, or find it finished."""
    import torch  # which other parts of prepare do without

    source = _source(studio.backbone, [*studio.read, *(place.tensor for place in studio.places)])
    key = _key(source, studio)
    made = {recipe.name: _kept(studio.folder, recipe, key) for recipe in recipes}
    missing = [recipe for recipe in recipes if made[recipe.name] is None]
    if missing:
        studied = _Studied.of(source, studio)
        total = len(missing) * round(studio.seconds)
        with (
            studio.reporter.step(f"teach {len(missing)} variants (s)", total=total) as advance,
            # One core each: small layers gain little from a second one.
            ThreadPoolExecutor(studio.threads, initializer=torch.set_num_threads, initargs=(1,)) as pool,
        ):
            done = pool.map(lambda recipe: _make(recipe, studied, studio, key, advance), missing)
            made |= {variant.name: variant for variant in done}
    return tuple(variant for variant in made.values() if variant is not None)


def check_learnable(backbone: Backbone, rows: InputArray) -> None:
    """Refuse a model of which no variant can learn, before anything takes time.

    Parameters
    ----------
    rows : array (n, ...)
        A few inputs, on which the module that learns must answer as ONNX Runtime does.

    Raises
    ------
    InvalidArgumentError
        It has operators through which nothing is learned.
    """
    import torch

    from offramp_worker.prepare.variants.twin import Twin

    source = _source(backbone, ())
    twin, x = Twin(source), pad_rows([rows], backbone.input)
    name = output_name(source)
    exact = tensor_values(open_session(source, threads=1), [name], x, entry=backbone.input.name)[name]
    try:
        with torch.no_grad():
            given = twin(torch.from_numpy(x))[0].numpy()
    except Exception as error:  # whatever an operator of an unknown kind makes PyTorch say
        raise InvalidArgumentError(
            f"variants: an operator of the model is of a kind through which variants cannot learn "
            f"({type(error).__name__}: {error}); leave --variants out"
        ) from error
    if given.shape != exact.shape or not np.allclose(given, exact, rtol=CLOSE, atol=CLOSE * np.abs(exact).max()):
        raise InvalidArgumentError(
            "variants: what learns does not answer as the model does, so an operator of the model is of a kind through "
            "which variants cannot learn; leave --variants out"
        )


def _source(backbone: Backbone, keep: Sequence[str]) -> onnx.ModelProto:
    """The graph that variants are edits of."""
    source = folded(backbone.model, keep=set(keep))
    del source.graph.value_info[:]
    return source


def forget(folder: Path) -> None:
    """Drop finished variants once the bundle holds what it needs of them."""
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Studied:
    """The folded reference, what layers read of some rows, and its blocks, those first that change answers least."""

    source: onnx.ModelProto
    moments: dict[str, Floats]
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, source: onnx.ModelProto, studio: Studio) -> _Studied:
        order = np.random.default_rng(studio.seed).permutation(len(studio.rows))[:STUDIED_ROWS]
        x = studio.rows[np.sort(order)]
        blocks = blocks_of(source, studio.places)
        with studio.reporter.step("study the model's layers", total=len(blocks) + 1) as advance:
            moments = input_moments(source, layers_of(source), x, studio.backbone.input, threads=studio.threads)
            advance(1)
            x = x[:COMPARED_ROWS]
            exact = _outputs(source, x, studio)
            effect = {}
            for block in blocks:
                changed = _outputs(without_blocks(source, [block]), x, studio)
                effect[block] = error_variance(changed, exact)
                advance(1)
        return cls(source, moments, tuple(sorted(blocks, key=effect.__getitem__)))


def _outputs(model: onnx.ModelProto, x: Array, studio: Studio) -> npt.NDArray[np.float32]:
    session = open_session(model, threads=studio.threads)
    spec, name = studio.backbone.input, output_name(model)
    values = tensor_values(session, [name], pad_rows([x], spec), entry=spec.name)[name]
    return np.asarray(studio.backbone.scale.to_logits(values), dtype=np.float32)


def _make(recipe: Recipe, studied: _Studied, studio: Studio, key: str, advance: Advance) -> Made:
    from offramp_worker.prepare.variants.distilling import Course, distill  # PyTorch, as above

    try:
        model, how = _edited(recipe, studied, studio)
    except (InvalidArgumentError, ValueError) as error:
        advance(round(studio.seconds))
        return Made(recipe.name, "", None, str(error))
    backbone = studio.backbone
    course = Course(
        studied.source, studio.rows, studio.unseen, backbone.input, backbone.scale, studio.seconds, studio.seed
    )
    there = {name for node in model.graph.node for name in node.output}
    try:
        learned = distill(model, course, read=[name for name in studio.read if name in there], advance=advance)
    except Exception as error:  # of what was edited PyTorch cannot run everything: this recipe does not fit the model
        return Made(recipe.name, "", None, f"it cannot learn: {type(error).__name__}: {error}")
    kept = "" if learned.kept == learned.steps else f", of which the first {learned.kept} are kept"
    method = f"{how}; {learned.steps} steps of distillation in {studio.seconds:g} s of processor time{kept}"
    made = Made(recipe.name, method, tidied(learned.model))
    _keep(studio.folder, recipe, made, key)
    return made


def _edited(recipe: Recipe, studied: _Studied, studio: Studio) -> tuple[onnx.ModelProto, str]:
    """The graph with something left out, and what that was.

    Raises
    ------
    InvalidArgumentError
        There is nothing of that kind to leave out.
    """
    model, moments, how = studied.source, studied.moments, []
    if recipe.blocks:
        number = round(recipe.blocks * len(studied.blocks))
        if not number:
            raise InvalidArgumentError(
                f"it has {len(studied.blocks)} blocks between features of one shape, too few to leave any out"
            )
        model = without_blocks(model, studied.blocks[:number])
        how.append(f"{number} of {len(studied.blocks)} blocks left out")
    if recipe.channels:
        model, pairs = pruned(model, moments, share=recipe.channels, keep=studio.read)
        if not pairs:
            raise InvalidArgumentError("its channels inside of blocks are too few to leave multiples of 8")
        how.append(f"{recipe.channels:.0%} of the channels left out between {pairs} pairs of layers")
    if recipe.energy < 1:
        model, divided = low_rank(model, moments, energy=recipe.energy)
        if not divided:
            raise InvalidArgumentError(f"at {recipe.energy:.0%} of the energy no layer would compute less")
        how.append(f"{recipe.energy:.0%} of the energy kept in {divided} layers of low rank")
    return model, ", ".join(how)


def _key(source: onnx.ModelProto, studio: Studio) -> str:
    """All that finished variants depend on, besides the recipe."""
    asked = [GENERATION, studio.seconds, studio.seed, studio.rows.shape, sorted(studio.read)]
    digest = hashlib.sha256(source.SerializeToString(deterministic=True))
    for rows in (studio.rows, studio.unseen):
        digest.update(np.ascontiguousarray(rows).tobytes())
    digest.update(repr(asked).encode())
    return digest.hexdigest()


def _files(folder: Path, recipe_name: str) -> tuple[Path, Path]:
    return folder / f"{recipe_name}.onnx", folder / f"{recipe_name}.json"


def _keep(folder: Path, recipe: Recipe, made: Made, key: str) -> None:
    """The note goes first and comes last, with the graph's digest: it never speaks of another graph."""
    assert made.model is not None
    graph, note = _files(folder, made.name)
    content = made.model.SerializeToString(deterministic=True)
    known = {"key": key, "recipe": asdict(recipe), "method": made.method, "sha256": _digest(content)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        note.unlink(missing_ok=True)
        for file, data in ((graph, content), (note, json.dumps(known).encode())):
            part = file.with_suffix(".part")
            part.write_bytes(data)
            part.replace(file)
    except OSError as error:
        raise InvalidArgumentError(f"variants cannot be kept in {folder}: {error.strerror}") from error


def _kept(folder: Path, recipe: Recipe, key: str) -> Made | None:
    graph, note = _files(folder, recipe.name)
    try:
        known = json.loads(note.read_bytes())
        content = graph.read_bytes()
        if known["key"] != key or known["recipe"] != asdict(recipe) or known["sha256"] != _digest(content):
            return None
        return Made(recipe.name, str(known["method"]), onnx.load_model_from_string(content))
    except Exception:  # whatever lies there, it is no variant of ours
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
