"""Tickets and the engine: begins, steps and stops their sequences, and notes what fails. Used by the engine's thread
alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offramp_worker.engine.arms.marker import CrashMarker
from offramp_worker.engine.vitals import Vitals
from offramp_worker.generate.seam import GenerationEngine, SequenceProgress
from offramp_worker.generate.tickets import Ticket
from offramp_worker.logs import log_event


class Computing:
    """See the module."""

    def __init__(
        self, engine: GenerationEngine, *, vitals: Vitals, marker: CrashMarker, clock: Callable[[], float]
    ) -> None:
        self._engine, self._vitals, self._marker, self._clock = engine, vitals, marker, clock

    def start(self, ticket: Ticket) -> None:
        """Begin with the step whose turn it is. Raises what :meth:`GenerationEngine.start` does."""
        ticket.sequence = self._engine.start(
            ticket.prompt,
            max_tokens=ticket.max_tokens,
            sampling=ticket.sampling,
            route=ticket.assigned.route(ticket.step),
        )
        ticket.began = ticket.began or self._clock()

    def step(self, tickets: Sequence[Ticket], tokens: int) -> tuple[list[SequenceProgress], float]:
        """What one turn of these did, in their order, and the seconds it took. Where it failed each has an error."""
        began = self._clock()
        canary = max((t.assigned.epoch for t in tickets if t.assigned.arm == "canary"), default=0)
        numbers = [t.sequence for t in tickets if t.sequence is not None]
        if canary:
            self._marker.enter(canary)
        try:
            progress = self._engine.step(numbers, prompt_tokens=tokens)
        except Exception as error:  # runtimes raise bare exceptions of their C++ side
            log_event("generation-failed", level="error", answers=len(numbers), error=str(error))
            progress = [SequenceProgress(n, ended=True, error=str(error) or type(error).__name__) for n in numbers]
            self._vitals.ended(1, failed=True)
        else:
            self._vitals.ended(1, failed=False)
        finally:
            if canary:
                self._marker.leave()
        return progress, self._clock() - began

    def stop(self, ticket: Ticket) -> None:
        """Give its caches back."""
        if ticket.sequence is not None:
            self._engine.cancel(ticket.sequence)
