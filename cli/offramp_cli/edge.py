"""Options of an edge box, the same for ``offramp serve`` and ``offramp up``."""

from __future__ import annotations

from typing import Annotated

import typer

CoreOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Be an edge: the core worker, http://HOST:PORT, that answers the rows that do not exit here. It must "
        "serve the same bundle.",
    ),
]
UplinkOption = Annotated[
    str | None,
    typer.Option(metavar="RATE", help="Rate of the uplink, such as 500kbit or 10Mbit. By default it is measured."),
]
ResidueOption = Annotated[
    str | None,
    typer.Option(
        metavar="Auto|Input|Features",
        help="What is sent to the core: the model's input, or the features after the last stage here. Auto, the "
        "default, measures which is answered first, and computes here what is faster here.",
    ),
]
OfflineOption = Annotated[
    str | None,
    typer.Option(
        metavar="Refuse|Answer",
        help="What rows that do not exit get while the core is out of reach: 503 (the default), or the answer of the "
        "last exit here, with `offline` in the reply.",
    ),
]
EdgesOption = Annotated[
    bool, typer.Option("--edges", help="Be a core: answer rows, features and audits of edges that serve this bundle.")
]


def edge_variables(
    *, core: str | None, uplink: str | None, residue: str | None, offline: str | None, edges: bool = False
) -> dict[str, str]:
    """What workers are told of it."""
    given = {"OFFRAMP_CORE": core, "OFFRAMP_UPLINK": uplink, "OFFRAMP_RESIDUE": residue, "OFFRAMP_OFFLINE": offline}
    given["OFFRAMP_EDGES"] = "true" if edges else None
    return {name: value for name, value in given.items() if value is not None}
