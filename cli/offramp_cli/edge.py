"""Options of an edge box, the same for ``offramp serve`` and ``offramp up``."""

from __future__ import annotations

from typing import Annotated

import typer

CoreOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Be an edge: the core worker, http://HOST:PORT, that answers what leaves at no exit here. It serves the "
        "same bundle.",
    ),
]
UplinkOption = Annotated[
    str | None,
    typer.Option(metavar="RATE", help="Of the uplink, such as 500kbit or 10Mbit; measured without it."),
]
ResidueOption = Annotated[
    str | None,
    typer.Option(
        metavar="Auto|Input|Features",
        help="What is sent to the core: the model's input, or what the last stage here hands on. Auto, the default, "
        "takes what is answered soonest, and computes here what is sooner here.",
    ),
]
OfflineOption = Annotated[
    str | None,
    typer.Option(
        metavar="Refuse|Answer",
        help="What such requests get while the core is out of reach: 503 (the default), or the answer of the last exit "
        "here, marked `offline` in the reply.",
    ),
]
EdgesOption = Annotated[
    bool, typer.Option("--edges", help="Be a core: take rows, features and audits of edges that serve this bundle.")
]


def edge_variables(
    *, core: str | None, uplink: str | None, residue: str | None, offline: str | None, edges: bool = False
) -> dict[str, str]:
    """What workers are told of it."""
    given = {"OFFRAMP_CORE": core, "OFFRAMP_UPLINK": uplink, "OFFRAMP_RESIDUE": residue, "OFFRAMP_OFFLINE": offline}
    given["OFFRAMP_EDGES"] = "true" if edges else None
    return {name: value for name, value in given.items() if value is not None}
