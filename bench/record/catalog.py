"""Which record sets there are, what makes each, and on which code and data it depends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import bench.cifar.data
import bench.record.cifar
import bench.record.minilm
import bench.record.network
import bench.record.scores
import bench.record.text
import bench.record.texts
import bench.record.video
import offramp_core.uncertainty
import offramp_worker.bundle.heads
import offramp_worker.prepare.cuts
import offramp_worker.prepare.families
import offramp_worker.prepare.features
import offramp_worker.prepare.profiling
import offramp_worker.prepare.training
from bench.record import cifar, texts, video
from bench.record.store import RecordSet, content_key, read_set
from bench.record.text import TextTask, record_text
from offramp_worker.prepare.progress import Reporter

SEED = 0
_SHARED: tuple[ModuleType, ...] = (
    bench.record.scores,
    offramp_core.uncertainty,
    offramp_worker.prepare.profiling,
    offramp_worker.prepare.training,
)
_NETWORK: tuple[ModuleType, ...] = (
    *_SHARED,
    bench.record.network,
    offramp_worker.bundle.heads,
    offramp_worker.prepare.cuts,
    offramp_worker.prepare.families,
    offramp_worker.prepare.features,
)


@dataclass(frozen=True, slots=True)
class Recorder:
    """Something that records one or more sets in one go.

    Attributes
    ----------
    names : tuple of str
        The sets it makes.
    files : callable
        The data files it reads.
    modules : tuple of modules
        The code its result depends on.
    record : callable
        Told a reporter and the sets named by ``needs``; makes the sets.
    needs : tuple of str
        Sets that must be recorded before.
    arguments : mapping
        What else the result depends on.
    """

    names: tuple[str, ...]
    files: Callable[[], Sequence[Path]]
    modules: tuple[ModuleType, ...]
    record: Callable[[Reporter, Mapping[str, RecordSet]], Sequence[RecordSet]]
    needs: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"seed": SEED})

    def key(self, folder: Path) -> str:
        """Content key; ``folder`` holds the sets it needs."""
        return content_key(
            modules=[str(module.__file__) for module in self.modules],
            files=[*self.files(), *(folder / f"{name}.npz" for name in self.needs)],
            arguments={"names": list(self.names), **self.arguments},
        )

    def run(self, reporter: Reporter, folder: Path) -> Sequence[RecordSet]:
        """Record; ``folder`` holds the sets it needs."""
        return self.record(reporter, {name: read_set(folder, name) for name in self.needs})


def _resnet(depth: int) -> Recorder:
    return Recorder(
        names=(f"resnet{depth}-mx4", f"resnet{depth}-gap"),
        files=lambda: cifar.data_files(depth),
        modules=(*_NETWORK, bench.cifar.data, bench.record.cifar),
        record=lambda reporter, _: cifar.record_resnet(reporter, depth=depth, seed=SEED),
    )


def _text(task: TextTask, files: Callable[[], Sequence[Path]]) -> Recorder:
    return Recorder(
        names=(f"{task.name}-mean", f"{task.name}-cls"),
        files=files,
        modules=(*_SHARED, bench.record.minilm, bench.record.texts, bench.record.text),
        record=lambda reporter, _: record_text(task, reporter, seed=SEED),
        arguments={"seed": SEED, "tokens": task.tokens, "tuning_tokens": task.tuning_tokens},
    )


SST2 = TextTask(
    name="sst2",
    title="SST-2 sentences",
    load=texts.load_sst2,
    tokens=64,
    tuning_tokens=64,
    groups="true class",
    licence="SST-2 (Socher et al. 2013), Stanford, research use; github.com/clairett/pytorch-sentiment-classification @ 457ffd8",
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
    licence="Multi-Domain Sentiment Dataset v2 (Blitzer et al. 2007), research; github.com/lorenzoritter/domainadaption @ f35a754",
)

RECORDERS: tuple[Recorder, ...] = (
    _resnet(56),
    _resnet(20),
    Recorder(
        names=("resnet56-cascade",),
        files=lambda: cifar.data_files(20, 56),
        modules=(*_SHARED, bench.cifar.data, bench.record.cifar),
        record=lambda reporter, sets: [cifar.record_cascade(reporter, seed=SEED, mx4=sets["resnet56-mx4"])],
        needs=("resnet56-mx4",),
    ),
    Recorder(
        names=("video-grid", "video-gap"),
        files=video.data_files,
        modules=(*_NETWORK, bench.cifar.data, bench.record.video),
        record=lambda reporter, _: video.record_video(reporter, seed=SEED),
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
