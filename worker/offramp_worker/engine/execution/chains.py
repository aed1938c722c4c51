"""Chains of stages: which kind of stage runs on which device."""

from __future__ import annotations

from collections.abc import Sequence

from offramp_worker.devices import Device
from offramp_worker.engine.execution.device_stages import DeviceStage
from offramp_worker.engine.execution.execute import Runnable
from offramp_worker.engine.execution.kept_stages import KeptStage
from offramp_worker.engine.execution.stages import Stage, StageSession


def stage_on(device: Device, session: StageSession, *, follows: bool, last: bool) -> Runnable:
    """A stage with what it needs of its own, one that ``follows`` another or is the ``last`` of its chain."""
    if device.is_cpu:
        return Stage(session, follows=follows)
    return (KeptStage if device.is_cuda else DeviceStage)(session, device, last=last)


def chain_on(device: Device, sessions: Sequence[StageSession]) -> tuple[Runnable, ...]:
    """A chain of stages for one arm."""
    last = len(sessions) - 1
    return tuple(stage_on(device, session, follows=k > 0, last=k == last) for k, session in enumerate(sessions))
