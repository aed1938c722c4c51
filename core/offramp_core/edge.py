"""Edge and core: what an edge worker sends of rows that leave at none of its exits, and when it sends them at once.

Pure; what sending takes was measured by who asks. The unit is the mean time until a row is answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from offramp_core.errors import InvalidArgumentError

#: What goes to the core: nothing (the rest is computed here), the model's input, or what the last stage handed on.
Sent = Literal["Nothing", "Input", "Features"]
Residue = Literal["Auto", "Input", "Features"]
Offline = Literal["Refuse", "Answer"]
RESIDUES: tuple[Residue, ...] = ("Auto", "Input", "Features")
OFFLINE: tuple[Offline, ...] = ("Refuse", "Answer")

WEIGHT = 0.1  # of the newest measurement
#: Every so many decisions the second best way is gone where it promises at most so much more: nobody else measures it.
TRY_EVERY, WORTH_A_TRY = 64, 1.3
LEAST_OWN = 0.1  # of the time that a body took: what its bytes did
PACE_WEIGHT, MOST_SLOWER = 0.05, 3.0  # of the newest batch; times the pace before, that it counts as at most


@dataclass(frozen=True, slots=True)
class Uplink:
    """What it takes to have the core answer."""

    bytes_per_second: float
    #: Of a request without a body.
    round_trip: float = 0.0
    #: By what is sent, seconds of a request beyond its bytes' own: round trip, waiting and the core's computing.
    #: Measured; not there before the first time.
    beyond: Mapping[Sent, float] = field(default_factory=dict)
    #: What was sent since the network was measured.
    tried: frozenset[Sent] = frozenset()

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise InvalidArgumentError(
                f"uplink is {self.bytes_per_second * 8:g} bit/s; it must be above 0, leave it out to have it measured"
            )

    def seconds(self, sent: Sent, *, size: int, saved: float = 0.0) -> float:
        """Until the answer to ``size`` bytes is here. Features that were never sent are taken to spare the core so many
        seconds of what it needs for inputs."""
        beyond = self.beyond.get(sent)
        if beyond is None:
            beyond = max(self.round_trip, self.beyond.get("Input", self.round_trip) - saved)
        return beyond + size / self.bytes_per_second

    def after(self, sent: Sent, *, size: int, seconds: float) -> Uplink:
        """With one more measurement."""
        now = max(0.0, seconds - size / self.bytes_per_second)
        before = self.beyond.get(sent, now)
        beyond = {**self.beyond, sent: before + WEIGHT * (now - before)}
        return replace(self, beyond=beyond, tried=self.tried | {sent})

    def measured(self, *, bytes_per_second: float, round_trip: float) -> Uplink:
        """The network itself was measured again. What was not sent since the last time is not known any more, and so
        will be tried."""
        beyond = {sent: seconds for sent, seconds in self.beyond.items() if sent in self.tried}
        return Uplink(bytes_per_second, round_trip, beyond)


def rate_of(size: int, *, seconds: float, round_trip: float) -> float:
    """Bytes per second of a link over which a body of ``size`` took so long. A tenth of that was its bytes' own at
    least: a round trip that was held up, or shared the link, must not make a slow one look as fast as any. With more
    than a tenth a fast link to a core far away looks so slow that nothing is ever sent, which alone would show it."""
    return size / max(1e-6, seconds - round_trip, LEAST_OWN * seconds)


@dataclass(frozen=True, slots=True)
class Rest:
    """Rows of one batch that nobody has answered yet: bytes of all of them, and seconds.

    ``features_bytes`` is None where features cannot be sent: the rest of the model reads more than them, or the core
    takes none. ``saved_seconds`` is what they spare the core, ``here_seconds`` what the rest takes on this machine.
    """

    input_bytes: int
    features_bytes: int | None
    saved_seconds: float
    here_seconds: float


def sent(rest: Rest, uplink: Uplink, *, residue: Residue, number: int) -> Sent:
    """What goes to the core of decision ``number``.

    A ``residue`` that was asked for is sent, the input where features cannot be. ``Auto`` sends what is answered
    soonest, or nothing where this machine is sooner.
    """
    if residue != "Auto":
        return "Features" if residue == "Features" and rest.features_bytes is not None else "Input"
    ways = costs(rest, uplink)
    best, *others = sorted(ways, key=lambda way: ways[way])
    if others and number % TRY_EVERY == TRY_EVERY - 1 and ways[others[0]] <= WORTH_A_TRY * ways[best]:
        return others[0]
    return best


@dataclass(frozen=True, slots=True)
class Place:
    """Where rows may be handed on: bytes of what is sent from there, and seconds of a core from there to the output."""

    size: int
    behind_seconds: float


def handed_on_at(places: Sequence[Place], *, bytes_per_second: float, pace: float) -> int:
    """Which of these places, in network order, features are sent from: that from which a row is answered soonest where
    this machine takes ``pace`` times as long as the core, and of equal ones that which spares the core most."""

    def seconds(place: Place) -> float:
        here = pace * (places[0].behind_seconds - place.behind_seconds)
        return round(here + place.size / bytes_per_second + place.behind_seconds, 9)

    return min(range(len(places)), key=lambda i: (seconds(places[i]), places[i].behind_seconds))


def goes_on(now: Place, later: Place, *, between_seconds: float, bytes_per_second: float) -> bool:
    """Whether rows are answered no later from a ``later`` place, which this machine reaches ``between_seconds`` from
    now, than if they are handed on ``now``."""
    there = between_seconds + later.size / bytes_per_second + later.behind_seconds
    return round(there, 9) <= round(now.size / bytes_per_second + now.behind_seconds, 9)


def paced(pace: float, *, took: float, expected: float) -> float:
    """How many times as long as expected batches take, with one more. One that is held up, as for a second, must not
    send rows up for as long as it takes to forget it."""
    return pace + PACE_WEIGHT * (min(took / expected, MOST_SLOWER * pace) - pace)


def costs(rest: Rest, uplink: Uplink) -> dict[Sent, float]:
    """Seconds until the rest is answered, by what is sent. Of equal ones the first is the best."""
    ways: dict[Sent, float] = {
        "Nothing": rest.here_seconds,
        "Input": uplink.seconds("Input", size=rest.input_bytes),
    }
    if rest.features_bytes is not None:
        ways["Features"] = uplink.seconds("Features", size=rest.features_bytes, saved=rest.saved_seconds)
    return ways


def at_once(rest: Rest, whole: Rest, uplink: Uplink, *, before_seconds: float, share: float) -> bool:
    """Whether all rows are answered sooner if the ``whole`` batch goes to the core before any exit is tried.

    Otherwise the stages up to the last exit take ``before_seconds`` here, and a ``share`` of the rows goes on as the
    ``rest``.
    """
    through = before_seconds + share * min(costs(rest, uplink).values())
    return uplink.seconds("Input", size=whole.input_bytes) < through
