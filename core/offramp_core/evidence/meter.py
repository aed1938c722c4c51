"""What one worker process counts of a stable plan: who left where, and what its batches took against those held back.

Costs are told in units of what a held-back batch of the same size takes *here*: the profile's time for the size, times
a factor that the first held-back batches set (profiles are measured elsewhere). Batches of all sizes thereby weigh
alike and lie within one narrow bound, without which a rare large batch would hide everything
(:mod:`offramp_core.evidence.savings` says why a bound is needed at all). A machine that becomes slower for a while is
slower for both ways of a batch; a running level of the held-back ones follows it, so that it widens nothing.

Memory and time per batch are constant: batches are put into the sums a block at a time.
"""

from __future__ import annotations

import statistics

from offramp_core.evidence import savings
from offramp_core.protocol import PlanCounts, SliceCounts, TimeSums

BOUND = 3.0  # a batch that takes longer, in times of its expected time, counts as this: a stall, not a cost of exits
CALIBRATION_BATCHES = 8
LEVEL_WEIGHT = 0.05  # of the newest held-back batch in the running level
_BLOCK = 256


class HoldbackMeter:
    """Counts of one plan since the process started; see :class:`offramp_core.protocol.PlanCounts` for what they are.

    Not safe for threads: whoever calls holds a lock.
    """

    def __init__(self, *, plan_hash: str, share: float) -> None:
        """``share`` of the batches are held back, in [0, 0.5]; at 0 nothing is compared, and exits are still
        counted."""
        self.plan_hash, self.share = plan_hash, share
        self._requests, self._exits = 0, dict[str, int]()
        self._batches = self._held_back = 0
        self._slices: dict[str, tuple[int, int]] = {}
        self._asked: dict[str, int] = {}
        self._first: list[float] = []
        self._scale: float | None = None
        self._level = 1.0
        self._waiting: list[tuple[float, float, bool, float]] = []
        self._audit_seconds = self._expected_seconds = 0.0
        self._states = [savings.init(share=share, bound=BOUND) for _ in range(2)] if share else []

    def count_replies(self, exit_name: str, rows: int) -> None:
        """Rows were answered with exits on, at this exit."""
        self._requests += rows
        self._exits[exit_name] = self._exits.get(exit_name, 0) + rows

    def count_audits(self, slice_name: str, *, audited: int, disagreements: int) -> None:
        """Requests of a slice were compared with the reference. The caller bounds how many slices there are."""
        n, k = self._slices.get(slice_name, (0, 0))
        self._slices[slice_name] = n + audited, k + disagreements

    def count_requests(self, slice_name: str, rows: int) -> None:
        """Rows of a slice were answered, and are counted there alone."""
        self._asked[slice_name] = self._asked.get(slice_name, 0) + rows

    def count_audit_time(self, seconds: float) -> None:
        """The engine spent this on the audit of a request that the plan, or the holdback beside it, has answered."""
        self._audit_seconds += seconds

    def count_audited_batch(self, *, expected_seconds: float) -> None:
        """Any batch whose rows may be drawn for audit; ``expected_seconds`` as in :meth:`count_batch`."""
        self._expected_seconds += expected_seconds

    def count_batch(
        self, *, held_back: bool, expected_seconds: float, answer_seconds: float, engine_seconds: float
    ) -> None:
        """A batch that could have been held back, and was or was not.

        Parameters
        ----------
        held_back : bool
            Drawn with probability ``share`` before anything of the batch was known but its size.
        expected_seconds : float
            What the profile says of a batch of this size with exits off, > 0.
        answer_seconds : float
            From its beginning to the reply, averaged over its rows.
        engine_seconds : float
            For which it kept the engine busy.
        """
        if not self._states:
            return
        if self._scale is None:
            self._calibrate(engine_seconds / expected_seconds if held_back else None)
            return
        unit = expected_seconds * self._scale
        answer, engine = min(answer_seconds / unit, BOUND), min(engine_seconds / unit, BOUND)
        self._waiting.append((answer, engine, held_back, self._level))
        self._batches += 1
        self._held_back += held_back
        if held_back:
            self._level += LEVEL_WEIGHT * (engine - self._level)
        if len(self._waiting) == _BLOCK:
            self._fold()

    def counts(self) -> PlanCounts:
        """Everything so far."""
        self._fold()
        sums = [TimeSums(s.saved, s.saved_surprise, s.spent, s.spent_surprise) for s in self._states]
        answer_time, engine_time = sums or (TimeSums(), TimeSums())
        return PlanCounts(
            self.plan_hash,
            self.share,
            self._requests,
            dict(self._exits),
            self._batches,
            self._held_back,
            answer_time,
            engine_time,
            {
                name: SliceCounts(*self._slices.get(name, (0, 0)), self._asked.get(name, 0))
                for name in self._slices.keys() | self._asked.keys()
            },
            self._audit_seconds,
            self._expected_seconds * (self._scale or 1.0),
        )

    def _calibrate(self, ratio: float | None) -> None:
        """The batches that set the unit are not measured in it; a median, because the first ones may be cold."""
        if ratio is None:
            return
        self._first.append(ratio)
        if len(self._first) == CALIBRATION_BATCHES:
            self._scale = max(statistics.median(self._first), 1e-9)

    def _fold(self) -> None:
        if not self._waiting:
            return
        answer, engine, held_back, level = zip(*self._waiting, strict=True)
        self._waiting.clear()
        self._states = [
            savings.update(state, seconds, held_back, forecast=level)
            for state, seconds in zip(self._states, (answer, engine), strict=True)
        ]
