"""A bundle's profile is parsed, and its times are times, whatever the rest of the bundle says."""

from __future__ import annotations

import math

from offramp_core.bundle import Profile
from offramp_core.errors import InvalidBundleError
from offramp_worker.documents import parse_document


def parse_profile(raw: bytes, *, name: str) -> Profile:
    """The profile in the file ``name``.

    Raises
    ------
    InvalidBundleError
        It is none, or has sizes that do not rise or times that no machine takes; the message begins with ``name``.
    """
    try:
        profile = parse_document(raw, Profile)
    except ValueError as error:
        raise InvalidBundleError(f"{name}: {error}") from error
    sizes = [batch.batch_size for batch in profile.batches]
    if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise InvalidBundleError(f"{name}: batch sizes are {sizes}; they must rise, the first at least 1")
    for batch in profile.batches:
        seconds = [batch.exact_seconds, batch.regroup_seconds, *batch.segment_seconds, *batch.ramp_seconds]
        for chain in batch.precisions.values():
            seconds += [*chain.segment_seconds, *chain.ramp_seconds]
        if batch.exact_seconds <= 0 or not all(math.isfinite(s) and s >= 0 for s in seconds):
            raise InvalidBundleError(f"{name}: batch size {batch.batch_size} has seconds that are not finite and >= 0")
    return profile
