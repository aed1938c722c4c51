"""What an answer takes of an engine that batches by itself: the seconds that the engine, full, would need for it.

Its wall time is nothing of the kind. Answers that are computed side by side share that time, and an engine with few of
them could do more: where a step takes as long for one as for eight, one alone fills an eighth. How long a token takes
beside how many is measured as answers end. Until that is known a step's time counts as its answers', which is how it is
where they are computed one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offramp_core.overload import Line


@dataclass(frozen=True, slots=True)
class EvenShares:
    """Seconds that ``each`` answer has had by the time ``at``, were the engine divided evenly among the ``running``.
    Between two moments it grows by what one that ran meanwhile has had.

    Examples
    --------
    >>> EvenShares().changed(by=2, now=1.0).changed(by=-1, now=3.0).until(4.0).each
    2.0
    """

    running: int = 0
    each: float = 0.0
    at: float = 0.0

    def until(self, now: float) -> EvenShares:
        return replace(self, each=self.each + (now - self.at) / max(1, self.running), at=now)

    def changed(self, *, by: int, now: float) -> EvenShares:
        """So many more run from ``now`` on."""
        return replace(self.until(now), running=self.running + by)


def measured(line: Line | None, *, beside: float, seconds: float) -> Line:
    """After an answer whose tokens took ``seconds`` each, as one of ``beside`` on average."""
    return Line(beside, seconds, 0.0, 0.0) if line is None else line.after(rows=beside, seconds=seconds)


def part_of_full(line: Line | None, *, beside: float, most: float) -> float:
    """What an engine does in a second that writes ``beside`` answers, as a share of what it does with ``most``.

    Examples
    --------
    >>> as_long_for_eight = Line(rows=4.0, seconds=0.01, variance=1000.0, covariance=0.0)
    >>> round(part_of_full(as_long_for_eight, beside=2, most=8), 2), part_of_full(None, beside=2, most=8)
    (0.25, 1.0)
    """
    if line is None or beside >= most:
        return 1.0
    return beside / line.predicted(beside) * line.predicted(most) / most
