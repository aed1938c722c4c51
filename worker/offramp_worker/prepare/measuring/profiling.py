"""Measuring what the backbone's segments, the heads and regrouping cost on this machine, by batch size.

Everything is timed with the serving executor (ONNX Runtime sessions cut exactly as a worker cuts them, see
:mod:`.pricing`), in interleaved rounds so that a busy moment hits all parts alike, and reported as medians. A head is
priced as a worker runs it, fused into the segment before it: the median of (segment with head and decision) minus
(segment) within a round, which includes what the extra output costs. With one thread the clock
is that thread's processor time, which neighbours on a shared machine do not inflate; with more, and on a GPU, it is
wall time. Segments are then scaled so that their sum is the time of the whole backbone. What the split itself costs
(calls, copies, fusions that the cut prevents) is shared out over the cuts and charged to their heads: only a plan that
uses a ramp cuts there, and without it the promised worst case would be too good.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import onnx

from offramp_core.bundle import BatchProfile, ChainProfile, Profile, RampSpec
from offramp_core.precision import Precision
from offramp_worker.bundle.heads import HeadNodes
from offramp_worker.bundle.lengths import typical_batch
from offramp_worker.devices import CPU, Device
from offramp_worker.prepare.measuring.pricing import Priced, Runs, opener
from offramp_worker.prepare.places.cuts import INPUT_POSITION, Place
from offramp_worker.prepare.source.data import InputArray
from offramp_worker.prepare.source.sources import Backbone

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
MIN_ROUNDS, MAX_ROUNDS = 5, 60
SMALLEST_HEAD_SECONDS = 20e-6  # a decision takes about as long; a difference below it is noise


@dataclass(frozen=True, slots=True)
class BatchMeasurement:
    """Seconds at one batch size. ``depth`` maps a place's position to the share of the backbone's time up to it."""

    batch_size: int
    exact_seconds: float
    segment_seconds: tuple[float, ...]
    head_seconds: Mapping[str, float]
    regroup_seconds: float
    depth: Mapping[int, float]

    def depth_at(self, position: int) -> float:
        """Share of the backbone's time up to a place, or the input."""
        return 0.0 if position == INPUT_POSITION else self.depth[position]

    def head_share(self, ramp_id: str) -> float:
        """A head's time as a share of the backbone's."""
        return self.head_seconds[ramp_id] / self.exact_seconds


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements by rising batch size, on a ``device``; segments lie between ``places``."""

    places: tuple[Place, ...]
    threads: int
    batches: tuple[BatchMeasurement, ...]
    device: Device = CPU

    def depth(self, position: int) -> float:
        """Share of the backbone's time up to a place, averaged over batch sizes."""
        return float(np.mean([batch.depth_at(position) for batch in self.batches]))


def measure(
    backbone: Backbone,
    places: Sequence[Place],
    heads: Sequence[HeadNodes],
    x: InputArray,
    *,
    threads: int,
    seconds: float,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    device: Device = CPU,
    advance: Callable[[int], None],
) -> Measurements:
    """Time the backbone in one piece, its segments between places, the heads and regrouping.

    Parameters
    ----------
    places : sequence of Place
        Where ramps are, by position; the model's input may be the first of them.
    heads : sequence of HeadNodes
        One per candidate ramp; their weights do not matter.
    x : (n, ...)
        Inputs to run on; repeated when there are fewer than the largest batch.
    seconds : float
        Time to spend in all, about; each batch size gets an equal part and at least 5 rounds.
    device : Device
        Where the sessions run. On a GPU each run ends when its results are there.
    advance : callable
        Told 1 after each batch size.
    """
    inside = [place for place in places if place.tensor != backbone.input.name]
    priced = Priced(
        backbone.model,
        heads,
        [place.tensor for place in inside],
        shapes={place.tensor: place.shape for place in inside},
        open_session=opener(threads=threads, device=device),
        device=device,
    )
    batches = []
    for size in batch_sizes:
        runs = priced.at(typical_batch(x, backbone.input, size=size))
        medians = time_jobs(jobs_of(runs), threads=threads, seconds=seconds / len(batch_sizes), device=device)
        batches.append(_measurement(size, inside, heads, medians))
        advance(1)
    return Measurements(tuple(places), threads, tuple(batches), device)


def profile_of(ramps: Sequence[RampSpec], measured: Measurements) -> Profile:
    """The profile of a set of ramps (sorted by position): segments between ramps instead of between places."""
    batches = []
    for batch in measured.batches:
        reached = [batch.depth_at(spec.position) * batch.exact_seconds for spec in ramps]
        edges = [0.0, *reached, batch.exact_seconds]
        batches.append(
            BatchProfile(
                batch_size=batch.batch_size,
                exact_seconds=batch.exact_seconds,
                segment_seconds=tuple(max(0.0, b - a) for a, b in pairwise(edges)),
                ramp_seconds=tuple(batch.head_seconds[spec.id] for spec in ramps),
                regroup_seconds=batch.regroup_seconds,
            )
        )
    return Profile(executor=measured.device.executor, threads=measured.threads, batches=tuple(batches))


def with_heads(measured: Measurements, seconds: Mapping[str, Mapping[int, float]]) -> Measurements:
    """Measurements with more heads: ramp id to seconds by batch size."""
    return replace(
        measured,
        batches=tuple(
            replace(b, head_seconds={**b.head_seconds, **{ramp: at[b.batch_size] for ramp, at in seconds.items()}})
            for b in measured.batches
        ),
    )


def with_chain(profile: Profile, precision: Precision, ramps: Sequence[RampSpec], measured: Measurements) -> Profile:
    """The profile with another precision's chain: ``ramps`` are the input ramps and then its own, as ``measured`` on
    its graph."""
    chain = profile_of(ramps, measured)
    assert [b.batch_size for b in profile.batches] == [b.batch_size for b in chain.batches]
    return replace(
        profile,
        batches=tuple(
            replace(b, precisions={**b.precisions, precision: ChainProfile(c.segment_seconds, c.ramp_seconds)})
            for b, c in zip(profile.batches, chain.batches, strict=True)
        ),
    )


def side_seconds(
    sides: Mapping[str, onnx.ModelProto],
    backbone: Backbone,
    x: InputArray,
    *,
    threads: int,
    seconds: float,
    device: Device = CPU,
) -> dict[str, dict[int, float]]:
    """Seconds of whole models at the input, with the decision who leaves, by ramp id and batch size. ``seconds`` are
    spent, about."""
    priced = Priced(
        backbone.model,
        (),
        (),
        shapes={},
        open_session=opener(threads=threads, device=device),
        sides=sides,
        device=device,
    )
    found: dict[str, dict[int, float]] = {name: {} for name in sides}
    for size in BATCH_SIZES:
        runs = priced.at(typical_batch(x, backbone.input, size=size))
        jobs = {name: Job(runs.heads[name][0]) for name in sides}
        medians = time_jobs(jobs, threads=threads, seconds=seconds / len(BATCH_SIZES), device=device)
        for name, median in medians.items():
            found[name][size] = median
    return found


def _measurement(
    size: int, places: Sequence[Place], heads: Sequence[HeadNodes], medians: Mapping[str, float]
) -> BatchMeasurement:
    raw = np.array([medians[f"segment {index}"] for index in range(len(places) + 1)])
    scaled = raw * (medians["exact"] / raw.sum())
    reached = np.cumsum(scaled) / medians["exact"]
    cut = max(0.0, float(raw.sum()) - medians["exact"]) / max(1, len(places))
    tensors = {place.tensor for place in places}
    regroups = [medians[f"regroup {index}"] for index in range(len(places))]
    return BatchMeasurement(
        batch_size=size,
        exact_seconds=medians["exact"],
        segment_seconds=tuple(float(s) for s in scaled),
        head_seconds={
            head.ramp_id: medians[f"head {head.ramp_id}"] + (cut if head.source in tensors else 0.0) for head in heads
        },
        regroup_seconds=float(np.median(regroups)) if regroups else 0.0,
        depth={place.position: float(reached[index]) for index, place in enumerate(places)},
    )


@dataclass(frozen=True, slots=True)
class Job:
    """Something to time. ``after`` runs untimed right before it, so that caches are as a worker finds them there.

    With ``beyond`` the result is what it takes more than the job of that name, in the same round; with ``but`` more
    than that job without this other one, which is part of it.
    """

    run: Callable[[], object]
    after: Callable[[], object] | None = None
    beyond: str = ""
    but: str = ""


def jobs_of(runs: Runs) -> dict[str, Job]:
    """Everything of a priced backbone, to be timed: exact, segment K, head ID, and regroup K behind segment K.

    Reading back from a GPU is no part of a segment, behind which the next one can be launched; it is part of a head,
    whose decision needs it.
    """
    jobs, wait = {"exact": Job(runs.exact)}, ""
    if runs.wait is not None:
        wait = "wait"
        jobs[wait] = Job(runs.wait)
    last = len(runs.segments) - 1
    jobs |= {f"segment {k}": Job(run, beyond=wait if k < last else "") for k, run in enumerate(runs.segments)}
    jobs |= {f"regroup {k}": Job(run, beyond=wait) for k, run in enumerate(runs.regroups)}
    for ramp, (run, segment) in runs.heads.items():
        waited = wait if segment is not None and segment < last else ""
        jobs[f"head {ramp}"] = Job(run, beyond="" if segment is None else f"segment {segment}", but=waited)
    return jobs


def clock_of(device: Device, *, threads: int) -> Callable[[], float]:
    """The clock that neighbours on a shared machine disturb least."""
    return time.thread_time if threads == 1 and device.is_cpu else time.perf_counter


def time_jobs(jobs: Mapping[str, Job], *, threads: int, seconds: float, device: Device = CPU) -> dict[str, float]:
    """Median seconds of each job over interleaved rounds, after one round of warm-up.

    Every round has an order of its own: a job right behind one that does nearly the same would find its weights in the
    caches, which makes a head timed behind its own segment look a third as dear as it is in a worker.
    """
    clock = clock_of(device, threads=threads)
    for job in jobs.values():
        job.run()
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    order = random.Random(0)  # noqa: S311 - no secret
    end = time.perf_counter() + seconds
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and time.perf_counter() > end:
            break
        for name, job in order.sample(list(jobs.items()), len(jobs)):
            if job.after is not None:
                job.after()
            start = clock()
            job.run()
            taken[name].append(clock() - start)
    medians = {name: float(np.median(values)) for name, values in taken.items()}
    for name, job in jobs.items():
        if job.beyond:
            more = np.subtract(taken[name], taken[job.beyond]) + (taken[job.but] if job.but else 0.0)
            medians[name] = max(SMALLEST_HEAD_SECONDS, float(np.median(more)))
    return medians
