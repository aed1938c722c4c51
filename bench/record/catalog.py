"""Which record sets there are, what makes each, and on which code and data it depends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import bench.cifar.data
import bench.record.cascade
import bench.record.cifar
import bench.record.costs
import bench.record.minilm
import bench.record.network
import bench.record.scores
import bench.record.text
import bench.record.text_costs
import bench.record.texts
import bench.record.video
import offramp_core.uncertainty
import offramp_worker.bundle.heads
import offramp_worker.prepare.families.cifar
import offramp_worker.prepare.heads.distillation
import offramp_worker.prepare.heads.features
import offramp_worker.prepare.measuring.profiling
import offramp_worker.prepare.places.cuts
from bench.record import cascade, cifar, text_costs, texts, video
from bench.record.costs import Costs
from bench.record.store import Keys, RecordSet, content_key, read_set
from bench.record.text import TextTask, record_text
from offramp_worker.prepare.progress import Reporter

SEED = 0
Modules = tuple[ModuleType, ...]
Sets = Mapping[str, RecordSet]

_SCORES: Modules = (bench.record.scores, offramp_core.uncertainty, offramp_worker.prepare.heads.distillation)
_NETWORK: Modules = (
    bench.record.network,
    offramp_worker.bundle.heads,
    offramp_worker.prepare.places.cuts,
    offramp_worker.prepare.families.cifar,
    offramp_worker.prepare.heads.features,
)
_COSTS: Modules = (bench.record.costs, offramp_worker.prepare.measuring.profiling)


@dataclass(frozen=True, slots=True)
class Recorder:
    """Something that records one or more sets in one go.

    Attributes
    ----------
    names : tuple of str
        The sets it makes.
    files : callable
        The data files it reads.
    record, measure : callable
        Told a reporter and the sets named by ``needs``; make the sets without costs, and their costs by set.
    scores_from, costs_from : tuple of modules
        The code that each of them depends on.
    needs : tuple of str
        Sets that must be recorded before.
    arguments : mapping
        What else the result depends on.
    """

    names: tuple[str, ...]
    files: Callable[[], Sequence[Path]]
    record: Callable[[Reporter, Sets], Sequence[RecordSet]]
    measure: Callable[[Reporter, Sets], Mapping[str, Costs]]
    scores_from: Modules
    costs_from: Modules
    needs: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"seed": SEED})

    def keys(self, folder: Path) -> Keys:
        """Content keys; ``folder`` holds the sets it needs."""
        return Keys(self._key(folder, self.scores_from), self._key(folder, self.costs_from))

    def needed(self, folder: Path) -> Sets:
        """The sets it needs, from ``folder``."""
        return {name: read_set(folder, name) for name in self.needs}

    def _key(self, folder: Path, modules: Modules) -> str:
        return content_key(
            modules=[str(module.__file__) for module in modules],
            files=[*self.files(), *(folder / f"{name}.npz" for name in self.needs)],
            arguments={"names": list(self.names), **self.arguments},
        )


def _resnet(depth: int) -> Recorder:
    return Recorder(
        names=(f"resnet{depth}-mx4", f"resnet{depth}-gap"),
        files=lambda: cifar.data_files(depth),
        record=lambda reporter, _: cifar.record_resnet(reporter, depth=depth, seed=SEED),
        measure=lambda reporter, _: cifar.resnet_costs(reporter, depth=depth, seed=SEED),
        scores_from=(*_SCORES, *_NETWORK, bench.cifar.data, bench.record.cifar),
        costs_from=(*_COSTS, *_NETWORK),
    )


def _text(task: TextTask, files: Callable[[], Sequence[Path]]) -> Recorder:
    return Recorder(
        names=(f"{task.name}-mean", f"{task.name}-cls"),
        files=files,
        record=lambda reporter, _: record_text(task, reporter, seed=SEED),
        measure=lambda reporter, _: text_costs.text_costs(task, reporter, seed=SEED),
        scores_from=(*_SCORES, bench.record.minilm, bench.record.texts, bench.record.text),
        costs_from=(*_COSTS, bench.record.minilm, bench.record.text_costs),
        arguments={"seed": SEED, "tokens": task.tokens, "tuning_tokens": task.tuning_tokens},
    )


SST2 = TextTask(
    name="sst2",
    title="SST-2 sentences",
    load=texts.load_sst2,
    tokens=64,
    tuning_tokens=64,
    groups="true class",
    licence="SST-2 (Socher et al. 2013), Stanford, research use; github.com/clairett/pytorch-sentiment-classification "
    "@ 457ffd8",
)
IMDB = TextTask(
    name="imdb",
    title="IMDB reviews",
    load=texts.load_imdb,
    tokens=128,
    tuning_tokens=64,
    groups="true class",
    licence="Large Movie Review Dataset v1.0 (Maas et al. 2011), citation asked, no licence text",
)
AMAZON = TextTask(
    name="amazon",
    title="Amazon reviews",
    load=texts.load_amazon,
    tokens=128,
    tuning_tokens=64,
    groups=f"kind of goods: {', '.join(texts.DOMAINS)}",
    licence="Multi-Domain Sentiment Dataset v2 (Blitzer et al. 2007), research; "
    "github.com/lorenzoritter/domainadaption @ f35a754",
)

RECORDERS: tuple[Recorder, ...] = (
    _resnet(56),
    _resnet(20),
    Recorder(
        names=(cascade.NAME,),
        files=lambda: cifar.data_files(20, 56),
        record=lambda reporter, sets: [cascade.record_cascade(reporter, seed=SEED, mx4=sets["resnet56-mx4"])],
        measure=lambda reporter, sets: cascade.cascade_costs(reporter, seed=SEED, mx4=sets["resnet56-mx4"]),
        scores_from=(*_SCORES, bench.cifar.data, bench.record.cascade),
        costs_from=(*_COSTS, bench.record.cascade),
        needs=("resnet56-mx4",),
    ),
    Recorder(
        names=("video-grid", "video-gap"),
        files=video.data_files,
        record=lambda reporter, _: video.record_video(reporter, seed=SEED),
        measure=lambda reporter, _: video.video_costs(reporter),
        scores_from=(*_SCORES, *_NETWORK, bench.cifar.data, bench.record.video),
        costs_from=(*_COSTS, *_NETWORK),
    ),
    _text(SST2, texts.sst2_files),
    _text(IMDB, texts.imdb_files),
    _text(AMAZON, texts.amazon_files),
)


def recorder_of(name: str) -> Recorder | None:
    """The recorder that makes a set; None where there is none of that name."""
    return next((recorder for recorder in RECORDERS if name in recorder.names), None)


def all_names() -> tuple[str, ...]:
    """Every set there is, in the order in which they can be recorded."""
    return tuple(name for recorder in RECORDERS for name in recorder.names)
