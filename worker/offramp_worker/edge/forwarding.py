"""Rows that leave an edge at none of its exits: what is sent of them, and what becomes of them when it comes back, or
does not.

Everything here is called by whoever has the engine's turn; the link's threads only hand results to the desk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.batching import exact_seconds
from offramp_core.edge import TRY_EVERY, Offline, Place, Residue, Rest, Sent, at_once, paced, sent
from offramp_core.task import top_labels
from offramp_worker.bundle.load import Bundle
from offramp_worker.edge.desk import EdgeDesk, plausible
from offramp_worker.edge.link import Link
from offramp_worker.edge.proof import MOST_KEPT, FeaturesProof, number_of
from offramp_worker.edge.wire import FEATURES, Reply, features_path
from offramp_worker.engine.arms.arms import Runtime
from offramp_worker.engine.execution.execute import GoOn, Leave, Onward
from offramp_worker.engine.execution.usual import UsualInputs
from offramp_worker.engine.queue.batcher import Batch
from offramp_worker.engine.queue.replies import Progress, Replies
from offramp_worker.engine.queue.tickets import Ticket
from offramp_worker.logs import log_event
from offramp_worker.metrics import Metrics

Array = npt.NDArray[Any]
Run = Callable[[Batch, Runtime, GoOn], Iterator[Leave]]
DECAY = 0.98  # of what was seen before a batch


@dataclass(slots=True)
class Share:
    """Of the rows of late, those that leave at no exit of a plan."""

    tried: float = 0.0
    went_on: float = 0.0

    def try_rows(self, rows: int) -> None:
        self.tried, self.went_on = DECAY * self.tried + rows, DECAY * self.went_on

    @property
    def value(self) -> float:
        return self.went_on / self.tried if self.tried else 0.0


@dataclass(frozen=True, slots=True)
class Edge:
    """The core of an edge, and what is sent to it."""

    link: Link
    residue: Residue
    offline: Offline


@dataclass(frozen=True, slots=True)
class _Way:
    """Rows on their way: of which batch, and the exit that they reached."""

    batch: Batch
    runtime: Runtime
    progress: Progress
    onward: Onward
    sent: Sent


class Forwarding:
    """See the module."""

    def __init__(
        self,
        edge: Edge,
        desk: EdgeDesk,
        bundle: Bundle,
        *,
        replies: Replies,
        metrics: Metrics,
        most_rows: int,
        everyones: float | None,
        clock: Callable[[], float],
        run: Run,
        in_force: Callable[[], Runtime],
    ) -> None:
        """At most so many rows are on their way at once. ``everyones`` is the deadline of requests that name none.
        ``run`` is the executor's, for batches that were sent whole in vain: they are tried with what is ``in_force``
        then."""
        self._link, self._desk, self._bundle = edge.link, desk, bundle
        self._residue, self._offline, self._replies, self._metrics = edge.residue, edge.offline, replies, metrics
        self._most_rows, self._everyones, self._clock = most_rows, everyones, clock
        self._run, self._in_force = run, in_force
        self._exact_seconds = exact_seconds(bundle.profile)
        self._name = bundle.manifest.inputs[0].name
        self._usual = UsualInputs(bundle.manifest.inputs[0], bundle.probe_x)
        self._proof = FeaturesProof(edge.link, desk, bundle, residue=edge.residue)
        self._number, self._rows_out = 0, 0
        self._pace = 1.0  # what stages take here, by what the bundle says
        self._shares: dict[str, Share] = {}  # by plan
        self._wholes = 0

    # --- before a plan is in force ------------------------------------------------------------------

    def hands_on_at(self, active: Sequence[int], behind: Mapping[int, float]) -> int | None:
        """As :meth:`offramp_worker.edge.proof.FeaturesProof.hands_on_at`."""
        return self._proof.hands_on_at(active, behind, pace=self._pace)

    # --- before a batch runs ------------------------------------------------------------------------

    @property
    def draws(self) -> bool:
        """Whether a batch that begins now counts for its plan; see :mod:`offramp_worker.edge.desk`."""
        return self._desk.draws and 2 * self._rows_out < self._most_rows

    @property
    def room(self) -> int:
        """How many rows that are not run may be drawn for audit now."""
        return self._desk.room if self.draws else 0

    def at_once(self, batch: Batch, runtime: Runtime) -> bool:
        """Whether a batch is answered soonest if it goes to the core whole, without trying an exit."""
        if self._residue != "Auto" or len(runtime.stages) < 2:
            return False
        share = self._share(runtime)
        if self._link.away or not self._whole_is_sooner(batch, runtime, share):
            share.try_rows(len(batch))
            return False
        self._wholes += 1
        if self._wholes % TRY_EVERY:
            return True
        share.try_rows(len(batch))  # else nobody would see that more rows leave by now
        return False

    def _share(self, runtime: Runtime) -> Share:
        name = runtime.plan.content_hash
        if name not in self._shares and len(self._shares) >= MOST_KEPT:
            self._shares.clear()
        return self._shares.setdefault(name, Share())

    def _whole_is_sooner(self, batch: Batch, runtime: Runtime, share: Share) -> bool:
        rows = max(1, round(share.value * len(batch)))
        size = batch.x.nbytes // len(batch)
        before, here, saved = self._seconds(runtime, len(batch), rows)
        rest = Rest(rows * size, None, saved, here)
        whole = Rest(len(batch) * size, None, 0.0, here)
        return at_once(rest, whole, self._link.uplink, before_seconds=before, share=share.value)

    # --- rows that leave at no exit -----------------------------------------------------------------------

    def take(self, batch: Batch, runtime: Runtime, progress: Progress, onward: Onward) -> bool:
        """Send rows to the core; False where they are to be computed here."""
        if self._link.serves_other or self._goes_on(batch, runtime, onward):
            return False
        self._learn(batch, runtime, progress, onward)
        onward = _allowed(runtime, onward)
        way = self._way(batch, runtime, onward)
        if way == "Nothing":
            return False
        progress.open_rows.difference_update(onward.rows.tolist())
        self._send(_Way(batch, runtime, progress, onward, way))
        return True

    def _way(self, batch: Batch, runtime: Runtime, onward: Onward) -> Sent:
        rows, size = len(onward.rows), batch.x.nbytes // len(batch)
        _, here, saved = self._seconds(runtime, len(batch), rows)
        if self._residue == "Auto" and self._rows_out + rows > self._most_rows:
            return "Nothing"
        self._number += 1
        features = onward.features.nbytes if self._can_send(runtime, onward) else None
        rest = Rest(rows * size, features, saved, here)
        decide = partial(sent, uplink=self._link.uplink, residue=self._residue, number=self._number)
        way = decide(rest)
        if way == "Features" and onward.ramp is not None and not self._proof.holds(runtime, onward.ramp):
            return decide(replace(rest, features_bytes=None))
        return way

    def _goes_on(self, batch: Batch, runtime: Runtime, onward: Onward) -> bool:
        """Whether features are sent from a later ramp than the exit that these rows have come to. A row with a deadline
        is sent at once: the exit's answer may be due before the later ramp is reached."""
        rows = onward.rows.tolist()
        if onward.ramp is None or any(self._deadline(batch.owners[row][0]) < math.inf for row in rows):
            return False
        n = len(rows)
        now = Place(n * (batch.x.nbytes // len(batch)), self._exact_seconds[min(n, len(self._exact_seconds)) - 1])
        return self._proof.goes_on(runtime, onward.ramp, rows=n, now=now, pace=self._pace)

    def _can_send(self, runtime: Runtime, onward: Onward) -> bool:
        """Whether features of these rows may be sent once they are proven."""
        if onward.ramp is None or not isinstance(onward.features, np.ndarray):
            return False
        return self._proof.may_send(runtime, onward.ramp)

    def _seconds(self, runtime: Runtime, rows: int, rest: int) -> tuple[float, float, float]:
        """Here: until the last exit has been tried with so many ``rows``, and of the ``rest``; and what features of the
        rest spare a core as fast as the bundle says."""
        if len(runtime.stages) < 2:
            return 0.0, self._pace * self._exact_seconds[min(rest, len(self._exact_seconds)) - 1], 0.0
        *tried, last = runtime.stage_seconds
        before = sum(stage[min(rows, len(stage) - 1)] for stage in tried)
        saved = sum(stage[min(rest, len(stage) - 1)] for stage in tried)
        return self._pace * before, self._pace * last[min(rest, len(last) - 1)], saved

    def _learn(self, batch: Batch, runtime: Runtime, progress: Progress, onward: Onward) -> None:
        if onward.ramp is None:
            return
        tried = runtime.stage_seconds[: number_of(runtime, onward.ramp) + 1]
        expected = sum(stage[min(len(batch), len(stage) - 1)] for stage in tried)
        if expected > 0:
            self._pace = paced(self._pace, took=self._clock() - progress.began, expected=expected)
        if runtime.plan.content_hash in self._shares:
            self._shares[runtime.plan.content_hash].went_on += len(onward.rows)

    # --- on their way -------------------------------------------------------------------------------

    def _send(self, way: _Way) -> None:
        """Rows that must be answered by some time are sent apart: nobody else gives up then."""
        now, until = self._clock(), np.array([self._until(way, i) for i in range(len(way.onward.rows))])
        for limited in (False, True):
            at = np.flatnonzero((until < math.inf) == limited)
            if not len(at):
                continue
            part = _Way(way.batch, way.runtime, way.progress, way.onward.take(at), way.sent)
            within = float(until[at].min()) - now
            if self._link.away or within <= 0 or self._rows_out + len(at) > self._most_rows:
                self._unanswered(part)
            else:
                self._forward(part, within)

    def _forward(self, way: _Way, within: float) -> None:
        rows = len(way.onward.rows)
        if way.sent == "Features":
            assert way.onward.ramp is not None
            what = features_path(self._bundle.columns[way.onward.ramp].id)
            name, x = FEATURES, way.onward.features
        else:
            what, name, x = "rows", self._name, way.batch.x[way.onward.rows]
        self._rows_out += rows
        self._desk.left()
        self._metrics.forwarded(way.sent.lower()).inc(rows)
        self._link.send(
            what,
            name,
            x,
            sent=way.sent,
            within=within,
            answered=lambda reply: self._desk.back(partial(self._came_back, way, reply)),
        )

    def _until(self, way: _Way, i: int) -> float:
        """When a row must be answered; a deadline matters where there is an exit's answer to give."""
        ticket, _ = way.batch.owners[int(way.onward.rows[i])]
        return min(ticket.expires, self._deadline(ticket) if way.onward.may_answer[i] else math.inf)

    def _deadline(self, ticket: Ticket) -> float:
        """As of :class:`offramp_worker.engine.queue.deadlines.Deadlines`."""
        if self._everyones is None or ticket.deadline < math.inf or ticket.has_own_budget:
            return ticket.deadline
        return ticket.admitted + self._everyones

    def _came_back(self, way: _Way, reply: Reply | None) -> None:
        self._rows_out -= len(way.onward.rows)
        logits = None if reply is None else self._checked(way, reply)
        ramp = way.onward.ramp if way.sent == "Features" else None
        other = reply is not None and ramp is not None and not self._proof.held(way.runtime, ramp, reply.boot)
        if logits is not None and not other:
            self._answer(way, logits)
        elif other or (way.sent == "Features" and not self._proof.core_takes_them and not self._link.away):
            self._send(_Way(way.batch, way.runtime, way.progress, way.onward, "Input"))
        else:
            self._unanswered(way)

    def _answer(self, way: _Way, logits: Array) -> None:
        """Each row gets an answer or an error, whatever these numbers are."""
        rows, open_rows = way.onward.rows.tolist(), way.progress.open_rows
        open_rows.update(rows)
        try:
            self._replies.answer(way.batch, way.runtime, Leave(way.onward.rows, None, logits), way.progress)
        except Exception:
            left = [row for row in rows if row in open_rows]
            open_rows.difference_update(left)
            reason = "the core's answer is none; come again"
            self._replies.refuse(way.batch, way.runtime, left, reason=reason, expired=False)
            raise

    def _checked(self, way: _Way, reply: Reply) -> Array | None:
        """The answers in a reply; None where they cannot be the model's."""
        logits, rows = reply.arrays.get("logits"), way.onward.rows
        if (
            logits is not None
            and logits.dtype == np.float32
            and logits.shape == (len(rows), self._bundle.task.width)
            and plausible(logits, way.batch.x[rows], self._usual)
        ):
            return logits
        reason = "its logits are not those of so many rows, or no finite numbers"
        log_event("core-refused", level="warning", core=self._link.core, what=way.sent, reason=reason)
        return None

    def _unanswered(self, way: _Way) -> None:
        """The core has not answered these rows, in time or at all. Where it serves another model by now, as while a new
        bundle is rolled out, they are computed here."""
        if self._link.serves_other:
            self._replies.missed(way.batch, way.runtime, way.onward.rows.tolist(), way.progress)
            self._run_here(way, way.runtime)
            return
        if self._offline == "Answer" and way.onward.ramp is None and not way.batch.never_exit:
            runtime = self._in_force()
            if not runtime.exits_off and not runtime.judges_itself:
                self._run_here(way, runtime)
                return
        self._give(way)

    def _run_here(self, way: _Way, runtime: Runtime) -> None:
        """Rows that were sent in vain run here and count for no plan. While the core is out of reach they get what the
        exits say."""
        rows, to_the_end = way.onward.rows, self._link.serves_other
        owners = [way.batch.owners[row] for row in rows.tolist()]
        batch = Batch(way.batch.x[rows], owners, never_exit=way.batch.never_exit)
        progress = Progress(self._clock(), set(range(len(rows))), counts=False)

        def rest(onward: Onward) -> bool:
            if to_the_end:
                return False
            progress.open_rows.difference_update(onward.rows.tolist())
            self._give(_Way(batch, runtime, progress, _allowed(runtime, onward), way.sent))
            return True

        try:
            for leave in self._run(batch, runtime, rest):
                self._replies.answer(batch, runtime, leave, progress)
        except Exception as error:  # each row gets an answer or an error
            log_event("batch-failed", level="error", rows=len(progress.open_rows), error=repr(error))
            left = sorted(progress.open_rows)
            self._replies.refuse(batch, runtime, left, reason=self._why(way), expired=False)

    def _give(self, way: _Way) -> None:
        """What there is to say without the core: an exit's answer, or why there is none."""
        now, onward = self._clock(), way.onward
        tickets = [way.batch.owners[row][0] for row in onward.rows]
        due = onward.may_answer & np.array([self._deadline(ticket) < math.inf for ticket in tickets])
        expired = ~due & np.array([ticket.expires <= now for ticket in tickets])
        offline = onward.may_answer & ~due & ~expired & np.array([not t.has_own_budget for t in tickets])
        if self._offline == "Refuse":
            offline[:] = False
        for some in (due, offline):
            if some.any():
                leave = Leave(onward.rows[some], onward.ramp, onward.logits[some])
                leave = leave._replace(due=some is due, offline=some is offline)
                self._replies.answer(way.batch, way.runtime, leave, way.progress)
        if expired.any():
            self._replies.refuse(way.batch, way.runtime, onward.rows[expired].tolist(), reason="", expired=True)
        if (refused := ~due & ~offline & ~expired).any():
            rows = onward.rows[refused].tolist()
            self._replies.refuse(way.batch, way.runtime, rows, reason=self._why(way), expired=False)
        self._replies.missed(way.batch, way.runtime, onward.rows[~due].tolist(), way.progress)

    def _why(self, way: _Way) -> str:
        away = self._link.away
        what = f"the core {self._link.core} is out of reach ({away})" if away else "the core failed or does not keep up"
        if self._offline == "Refuse" or way.onward.ramp is not None:
            return f"{what}, and this row leaves at no exit of the edge; come again"
        return f"{what}, and exits are off here; come again"


def _allowed(runtime: Runtime, onward: Onward) -> Onward:
    """What an exit must not answer, it does not answer while the core is away either."""
    if onward.ramp is None:
        return onward
    fine = onward.may_answer & np.isfinite(onward.logits).all(axis=1)
    if runtime.stopped_classes:
        fine &= ~np.isin(top_labels(onward.logits), runtime.stopped_classes)
    return replace(onward, may_answer=fine)
