"""Whether a worker is an edge, and of which core: parsed with its other settings, and before workers are started.

| variable | meaning |
|---|---|
| OFFRAMP_CORE | address of the core worker, http://HOST:PORT; with it the worker is an edge |
| OFFRAMP_UPLINK | rate of the uplink, such as 10Mbit; default: measured |
| OFFRAMP_RESIDUE | what is sent of rows that leave at no exit: Auto (default), Input or Features |
| OFFRAMP_OFFLINE | what such rows get while the core is out of reach: Refuse (default), or Answer, the last exit's |
| OFFRAMP_EDGES | true: this worker is a core and takes rows, features and audits of edges |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from offramp_core.edge import OFFLINE, RESIDUES, Offline, Residue
from offramp_core.errors import InvalidArgumentError

RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(k|M|G)?bit(?:/s)?")
FACTOR = {None: 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
Word = TypeVar("Word", bound=str)


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """Of a worker that is an edge."""

    #: Where the core is, without a path.
    core: str
    #: Bytes per second; None where it is to be measured.
    uplink: float | None = None
    residue: Residue = "Auto"
    offline: Offline = "Refuse"


def edge_settings(env: Mapping[str, str]) -> EdgeSettings | None:
    """None for a worker that is no edge.

    Raises
    ------
    InvalidArgumentError
        Names the variable, its value and what it must be.
    """
    core = env.get("OFFRAMP_CORE", "")
    if not core:
        for name in ("OFFRAMP_UPLINK", "OFFRAMP_RESIDUE", "OFFRAMP_OFFLINE"):
            if env.get(name):
                raise InvalidArgumentError(f"{name} is set and OFFRAMP_CORE is not; give the address of the core")
        return None
    if takes_edges(env):
        raise InvalidArgumentError("OFFRAMP_EDGES is set and so is OFFRAMP_CORE; a worker is a core or an edge")
    return EdgeSettings(
        core=_address(core),
        uplink=_rate(env.get("OFFRAMP_UPLINK", "")),
        residue=_word(env, "OFFRAMP_RESIDUE", RESIDUES),
        offline=_word(env, "OFFRAMP_OFFLINE", OFFLINE),
    )


def takes_edges(env: Mapping[str, str]) -> bool:
    """Whether a worker is a core; raises as :func:`edge_settings` does."""
    return _word(env, "OFFRAMP_EDGES", ("false", "true")) == "true"


def _address(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        good = False
    if not good or parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise InvalidArgumentError(f"OFFRAMP_CORE is {_shown(text)}; it must be the core's http://HOST:PORT")
    return text.rstrip("/")


def _shown(text: str) -> str:
    """An address for a message: of one that may hold a password or a token, its host and port only."""
    if not set("@?#") & set(text):
        return repr(text[:200])
    try:
        parts = urlsplit(text)
        plain = "@" not in parts.path + parts.query + parts.fragment and bool(parts.hostname)
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        plain = False
    return f"{f'{parts.hostname}{port}'!r} with a user, query or fragment" if plain else "no address"


def bytes_per_second(text: str) -> float:
    """What a rate such as ``10Mbit`` is; 0 for a text that is none."""
    found = RATE.fullmatch(text)
    return float(found[1]) * FACTOR[found[2]] / 8 if found else 0.0


def _rate(text: str) -> float | None:
    """Bytes per second."""
    if not text:
        return None
    rate = bytes_per_second(text)
    if not rate > 0:
        raise InvalidArgumentError(
            f"OFFRAMP_UPLINK is {text[:80]!r}; it must be a rate above 0 such as 500kbit or 10Mbit, or left out to be "
            "measured"
        )
    return rate


def _word(env: Mapping[str, str], name: str, choices: tuple[Word, ...]) -> Word:
    """One of some words; the first is the default."""
    text = env.get(name, "") or choices[0]
    for choice in choices:
        if text == choice:
            return choice
    raise InvalidArgumentError(f"{name} is {text[:80]!r}; choose from {', '.join(choices)}")
