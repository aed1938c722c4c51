"""The ramp sets that a worker holds: heads for one model, each with its sessions and its ring of records.

A bundle brings one set along; others come from the store at run time. At most two are held between documents; what
batches in flight still run is let go when they end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offramp_core.errors import InvalidBundleError, PlanRefusedError
from offramp_core.reasons import Reason
from offramp_worker.bundle.load import Bundle
from offramp_worker.bundle.ramp_sets import RampSet, StoreUnreadableError, load_ramp_set, own_set
from offramp_worker.engine.accounts.counters import RecordRing
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.logs import log_event

MAX_HELD = 2


class PlanPostponedError(PlanRefusedError):
    """A plan cannot be taken now for a cause that may pass by itself: a shared claim may show a new folder seconds
    late, an executor recover."""


@dataclass(frozen=True, slots=True)
class HeldSet:
    """A ramp set ready to serve and to score audits."""

    ramp_set: RampSet
    sessions: Sessions
    ring: RecordRing

    @property
    def digest(self) -> str:
        return self.ramp_set.digest

    @property
    def bundle(self) -> Bundle:
        return self.ramp_set.bundle


class HeldSets:
    """What is held now, at least one set. Changed by the thread that applies plans; everybody else reads ``held``
    once."""

    def __init__(
        self,
        bundle: Bundle,
        sessions: Sessions,
        *,
        store: Path | None = None,
        rings: Mapping[str, RecordRing] | None = None,
    ) -> None:
        """``rings``: those of sets that an engine before this one held go on."""
        self.own, self._store, self._rings = bundle, store, dict(rings or {})
        self._next = max([0, *(ring.next for ring in self._rings.values())])
        self.held: tuple[HeldSet, ...] = ()
        self.held = (HeldSet(own_set(bundle), sessions, self._ring(bundle)),)

    @property
    def own_digest(self) -> str:
        return self.own.manifest.ramp_set_digest

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(held.digest for held in self.held)

    def loaded(self, digests: Sequence[str]) -> dict[str, HeldSet]:
        """Those sets by digest; what is not held yet is loaded and verified, and held only once :meth:`keep` says so.

        Raises
        ------
        PlanRefusedError
            ``DigestMismatch`` without a store, ``RampSetNotHeld`` where it cannot give the set, ``TooManyRampSets``.
        PlanPostponedError
            ``RampSetNotHeld`` where the store cannot be read, or does not show the set, which may come.
        """
        if len(set(digests)) > MAX_HELD:
            raise PlanRefusedError(
                Reason.TOO_MANY_RAMP_SETS,
                f"the document needs {len(set(digests))} ramp sets; a worker holds at most {MAX_HELD}",
            )
        known = {held.digest: held for held in self.held}
        return {digest: known[digest] if digest in known else self._load(digest) for digest in dict.fromkeys(digests)}

    def keep(self, sets: Sequence[HeldSet]) -> None:
        """Hold these, and let the others go."""
        before = self.held
        self._next = max(self._next, *(held.ring.next for held in before))
        self.held = tuple(sets)
        for held in before:
            if held not in self.held:
                log_event("ramp-set-dropped", digest=held.digest)

    def _load(self, digest: str) -> HeldSet:
        if digest != self.own_digest and self._store is None:
            raise PlanRefusedError(
                Reason.DIGEST_MISMATCH,
                f"rampSetDigest is {digest}; this worker has loaded {self.own_digest} and has no ramp-set store",
            )
        try:
            ramp_set = own_set(self.own) if digest == self.own_digest else self._from_store(digest)
            sessions = Sessions(ramp_set.bundle, threads=self.held[0].sessions.threads, like=self.held[0].sessions)
        except StoreUnreadableError as error:
            raise PlanPostponedError(Reason.RAMP_SET_NOT_HELD, f"rampSetDigest {digest}: {error}") from error
        except InvalidBundleError as error:
            raise PlanRefusedError(Reason.RAMP_SET_NOT_HELD, f"rampSetDigest {digest}: {error}") from error
        log_event("ramp-set-loaded", digest=digest)
        return HeldSet(ramp_set, sessions, self._ring(ramp_set.bundle))

    def _from_store(self, digest: str) -> RampSet:
        assert self._store is not None
        return load_ramp_set(self._store, digest, self.own)

    def _ring(self, bundle: Bundle) -> RecordRing:
        """Its numbers begin where those of all earlier ones ended: a set that is held for a second time must not repeat
        them."""
        if before := self._rings.pop(bundle.manifest.ramp_set_digest, None):
            return before
        return RecordRing(
            n_ramps=len(bundle.columns),
            ramp_set_digest=bundle.manifest.ramp_set_digest,
            first=max([self._next, *(held.ring.next for held in self.held)]),
            losses=not bundle.task.names_classes,
            graded=bundle.task.graded,
        )
