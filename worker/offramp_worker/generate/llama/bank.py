"""Caches of answers that are written side by side, one behind the other in one memory, so that one pass computes the
next token of all of them and reads the weights once.

The runtime's attention takes several sequences in one pass where each brings one token and their caches are neighbors.
Every place has room for the longest sequence; the system gives memory to what is written alone, and gets it back when
a sequence leaves.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Protocol

import numpy as np

from offramp_worker.generate.llama.architecture import Architecture
from offramp_worker.generate.llama.decoder import Cache, Decoder, FloatArray
from offramp_worker.logs import log_event

PLACES = 8  # sequences of one pass at most
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's; Python names it from 3.13 on


class Seated(Protocol):
    """Whose cache lies in a bank: ``length`` tokens of it count, behind which the first of ``pending`` is computed."""

    number: int
    length: int
    pending: list[int]
    cache: Cache


@dataclass(frozen=True, slots=True)
class Row:
    """What a pass gives to one of its sequences: logits, and an even share of its seconds."""

    logits: FloatArray
    seconds: float


class Bank:
    """Up to ``PLACES`` sequences without a gap between them. Used by one thread."""

    def __init__(self, a: Architecture, capacity: int) -> None:
        """Room for ``capacity`` tokens of each sequence."""
        token = a.kv_heads * a.head_width * np.dtype(np.float32).itemsize
        pages = mmap.PAGESIZE // gcd(mmap.PAGESIZE, token)  # tokens that fill whole pages
        shape = (a.layers, 2, PLACES, a.kv_heads, -(-capacity // pages) * pages, a.head_width)
        self._place_bytes = token * shape[4]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        self._memory = mmap.mmap(-1, a.layers * 2 * PLACES * self._place_bytes, flags=flags)
        self.values: FloatArray = np.frombuffer(self._memory, dtype=np.float32).reshape(shape)
        self.members: list[Seated] = []
        self._neighbors: dict[tuple[int, int], Cache] = {}

    @property
    def full(self) -> bool:
        return len(self.members) == PLACES

    def enter(self, one: Seated) -> None:
        """What its cache holds comes into the bank."""
        place = len(self.members)
        self.values[:, :, place, :, : one.length] = one.cache.values[:, :, 0, :, : one.length]
        self.members.append(one)
        one.cache = self._cache(place, place + 1)

    def leave(self, one: Seated) -> None:
        """Its memory is given back, and the last member takes its place."""
        place, last = self.members.index(one), self.members.pop()
        if last is not one:
            written = last.length + 1  # the token of a pass whose outcome has not been read yet may be behind its text
            self.values[:, :, place, :, :written] = self.values[:, :, len(self.members), :, :written]
            self.members[place] = last
            last.cache = self._cache(place, place + 1)
        self._give_back(len(self.members))

    def neighbors(self, some: Sequence[Seated]) -> list[list[int]]:
        """Places of some members, those next to each other together."""
        found: list[list[int]] = []
        for place in sorted(self.members.index(one) for one in some):
            if found and found[-1][-1] == place - 1:
                found[-1].append(place)
            else:
                found.append([place])
        return found

    def run(self, decoder: Decoder, places: Sequence[int]) -> FloatArray:
        """Logits behind the pending token of each of the members at these places, which are neighbors."""
        cache, some = self._cache(places[0], places[-1] + 1), [self.members[place] for place in places]
        return decoder.run_each(cache, [one.pending[0] for one in some], starts=[one.length for one in some])

    def _cache(self, first: int, end: int) -> Cache:
        if (first, end) not in self._neighbors:
            self._neighbors[first, end] = Cache(self.values[:, :, first:end])
        return self._neighbors[first, end]

    def _give_back(self, place: int) -> None:
        layers, kinds = self.values.shape[:2]
        for i in range(layers * kinds):
            self._memory.madvise(mmap.MADV_DONTNEED, (i * PLACES + place) * self._place_bytes, self._place_bytes)


class Banks:
    """As many banks as are needed for the sequences of one variant."""

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        self._decoder, self._capacity = decoder, capacity
        self._banks: list[Bank] = []
        self._refused = False  # no memory for a bank, which every step would find out again

    def run(self, some: Sequence[Seated]) -> dict[int, Row]:
        """Compute the pending token of each, those in one bank next to each other in one pass; the others are left out.

        Where a pass fails nothing comes of it: whoever computes its sequences alone is told which one is at fault.
        """
        rows: dict[int, Row] = {}
        if not self._seat(some):
            return rows
        try:
            for bank in self._banks:
                for places in bank.neighbors([one for one in some if one in bank.members]):
                    if len(places) < 2:
                        continue
                    began = time.perf_counter()
                    logits = bank.run(self._decoder, places)
                    share = (time.perf_counter() - began) / len(places)
                    rows |= {bank.members[p].number: Row(row, share) for p, row in zip(places, logits, strict=True)}
        except Exception as error:  # bare ones of the runtime's C++ side
            log_event("pass-failed", level="warning", answers=len(some) - len(rows), error=str(error))
        return rows

    def leave(self, one: Seated) -> None:
        """It has ended; one that never entered is no error."""
        for bank in self._banks:
            if one in bank.members:
                bank.leave(one)
        self._banks = [bank for bank in self._banks if bank.members]

    def _seat(self, some: Sequence[Seated]) -> bool:
        """Whether all of them lie in banks; where one could not be made, answers are computed alone from then on."""
        if self._refused:
            return False
        try:
            self._enter(some)
        except (OSError, ValueError, MemoryError) as error:
            self._refused = True
            log_event("bank-refused", level="warning", error=str(error))
        return not self._refused

    def _enter(self, some: Sequence[Seated]) -> None:
        seated = [one for bank in self._banks for one in bank.members]
        for one in some:
            if one in seated:
                continue
            bank = next((bank for bank in self._banks if not bank.full), None)
            if bank is None:
                bank = Bank(self._decoder.architecture, self._capacity)
                self._banks.append(bank)
            bank.enter(one)


@dataclass(slots=True, eq=False)
class _Some:
    """A sequence of made-up keys and values."""

    number: int
    length: int
    pending: list[int]
    cache: Cache


def computes_alike(decoder: Decoder) -> bool:
    """Whether a token's logits are, bit by bit, those that it has alone, however many others are in the pass.

    It depends on the kernels: those of fp32 add up each row in the same order whatever rows there are beside it, some
    of few bits do not. Where they do not, an answer would depend on who else is served.
    """
    a = decoder.architecture
    most = min(PLACES, a.context_length - 1)
    bank, rng = Bank(a, most + 1), np.random.default_rng(0)
    for length in range(1, most + 1):
        cache = Cache.of(a, length + 1)
        cache.values[...] = rng.standard_normal(cache.values.shape)
        bank.enter(_Some(length, length, [length * (a.vocabulary - 1) // most], cache))
    alone = [bank.run(decoder, [place])[0] for place in range(most)]
    return all(np.array_equal(bank.run(decoder, range(n)), np.stack(alone[:n])) for n in range(2, most + 1))
