"""``offramp prepare --remeasure``: what the model and the ramps of a bundle cost on another device or machine.

Model, heads and records stay, and so do the digests that plans and certificates name: workers with either bundle serve
the same plans, and their audits are one sample. The profile alone is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offramp_core.bundle import RECORDS_FILE, Profile, RampSpec, profile_arrays
from offramp_core.errors import InvalidArgumentError
from offramp_core.precision import EXACT, Precision
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.devices import DEVICES, Device, missing
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.prepare.measuring.profiling import (
    BATCH_SIZES,
    Measurements,
    measure,
    profile_of,
    side_seconds,
    with_chain,
    with_heads,
)
from offramp_worker.prepare.pipeline import PrepareRequest, check_request, read_inputs
from offramp_worker.prepare.places.cuts import Place
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.refresh import as_sent, check_fits
from offramp_worker.prepare.source.data import InputArray
from offramp_worker.prepare.source.sources import Backbone
from offramp_worker.prepare.source.task import found_scale
from offramp_worker.prepare.writing import write_remeasured


@dataclass(frozen=True, slots=True)
class RemeasureReport:
    """The bundle that was written, and seconds of the whole model by batch size: as its ``profile`` was, and is now."""

    out: Path
    backbone_digest: str
    ramp_set_digest: str
    before: Profile
    now: Profile

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "out": str(self.out),
            "backbone_digest": self.backbone_digest,
            "ramp_set_digest": self.ramp_set_digest,
            **{name: _whole(profile) for name, profile in (("before", self.before), ("now", self.now))},
        }


def _whole(profile: Profile) -> dict[str, Any]:
    seconds = {str(batch.batch_size): batch.exact_seconds for batch in profile.batches}
    return {"executor": profile.executor, "threads": profile.threads, "exact_seconds": seconds}


def remeasure_bundle(request: PrepareRequest, reporter: Reporter) -> RemeasureReport:
    """Measure the bundle in folder ``request.model`` on ``request.device`` of this machine, on inputs of
    ``request.data``, and write it with that profile.

    Raises
    ------
    InvalidBundleError
        The bundle is damaged, or does not say on that device what it says on its own.
    InvalidArgumentError
        The device is not here, or the bundle's model or a precision of it is not for that device; or the data do not
        fit.
    """
    check_request(request)
    bundle, device = load_bundle(Path(request.model)), DEVICES[request.device]
    _check_device(bundle, device)
    inputs = read_inputs(*as_sent(request, bundle))
    if inputs.x.dtype.kind == bundle.input_dtype.kind:
        inputs = inputs.fitted(bundle.manifest.inputs[0])
    check_fits(inputs.x, bundle.manifest, request.data)
    profile = _Remeasuring(bundle, request, device, inputs.x, reporter).profile()
    # What a worker does before it serves: the device must reproduce the bundle's probe.
    Sessions(replace(bundle, profile=profile), threads=request.threads)
    with np.load(bundle.path / RECORDS_FILE, allow_pickle=False) as stored:
        records = {**stored, **profile_arrays(profile)}
    manifest = write_remeasured(bundle.path, request.out, bundle.manifest, profile=profile, records=records)
    return RemeasureReport(
        request.out, manifest.backbone_digest, manifest.ramp_set_digest, before=bundle.profile, now=profile
    )


def _check_device(bundle: Bundle, device: Device) -> None:
    if reason := missing(device):
        raise InvalidArgumentError(f"device {device.name}: {reason}")
    own = bundle.device
    if device.name != own.name and (device.rounds or own.rounds):
        rounding = device.name if device.rounds else own.name
        raise InvalidArgumentError(
            f"device {device.name}: {rounding} rounds products, so the model answers otherwise; prepare the model "
            "again, and serve it as a service of its own"
        )
    lower = [spec.name for spec in bundle.manifest.precisions]
    if lower and device.is_cpu != own.is_cpu:
        raise InvalidArgumentError(
            f"device {device.name}: the bundle has {', '.join(lower)}, made for {own.name}; prepare the model with "
            "--precision exact, and measure that bundle here"
        )


class _Remeasuring:
    """One bundle on one device."""

    def __init__(
        self, bundle: Bundle, request: PrepareRequest, device: Device, x: InputArray, reporter: Reporter
    ) -> None:
        manifest = self._manifest = bundle.manifest
        self._bundle, self._request, self._device, self._x, self._reporter = bundle, request, device, x, reporter
        self._backbone = Backbone(
            bundle.backbone,
            manifest.name,
            manifest.inputs[0],
            manifest.outputs[0],
            scale=manifest.scale or found_scale(bundle.probe_logits),
            declared=manifest.task,
        )

    def profile(self) -> Profile:
        """Seconds of every chain."""
        request, at_input = self._request, self._ramps("")
        ramps = (*at_input, *self._ramps(EXACT))
        sides = side_seconds(
            {self._bundle.columns[j].id: model for j, model in self._bundle.side_models.items()},
            self._backbone,
            self._x,
            threads=request.threads,
            seconds=request.profile_seconds / 4,
            device=self._device,
        )
        exact = with_heads(self._measured(EXACT, ramps), sides)
        profile = profile_of(ramps, exact)
        shared = {ramp.id: {b.batch_size: b.head_seconds[ramp.id] for b in exact.batches} for ramp in at_input}
        for spec in self._manifest.precisions:
            own = self._ramps(spec.name)
            measured = with_heads(self._measured(spec.name, own), shared)
            profile = with_chain(profile, spec.name, (*at_input, *own), measured)
        return profile

    def _ramps(self, precision: Precision | str) -> tuple[RampSpec, ...]:
        return tuple(ramp for ramp in self._manifest.ramps if self._manifest.precision_of(ramp) == precision)

    def _measured(self, precision: Precision, ramps: Sequence[RampSpec]) -> Measurements:
        """The graph of a precision with its heads; models at the input have none."""
        bundle, request = self._bundle, self._request
        ids = {ramp.id for ramp in ramps}
        heads = [head for head in bundle.heads if head is not None and head.ramp_id in ids]
        read = {ramp.position: ramp.tensor for ramp in ramps if ramp.tensor != self._backbone.input.name}
        places = [Place(position, read[position], tuple(bundle.shapes[read[position]])) for position in sorted(read)]
        with self._reporter.step(f"measure the {precision} profile", total=len(BATCH_SIZES)) as advance:
            return measure(
                replace(self._backbone, model=bundle.backbones[precision]),
                places,
                heads,
                self._x,
                threads=request.threads,
                seconds=request.profile_seconds,
                device=self._device,
                advance=advance,
            )
