"""``offramp serve DIR``: one worker in the foreground. Without a control plane nobody delivers a plan, so exits stay
off."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from offramp_core.errors import OfframpError


def serve(
    bundle: Annotated[Path, typer.Argument(metavar="DIR", help="An exit bundle that `offramp prepare` wrote.")],
    port: Annotated[
        int, typer.Option(help="Port of the Open Inference Protocol; 0 takes a free one.", min=0, max=65535)
    ] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of the same protocol over gRPC; not opened unless given.", min=0, max=65535)
    ] = None,
) -> None:
    """Serve a bundle over the Open Inference Protocol v2.

    The OFFRAMP_ variables of the environment apply as well: with OFFRAMP_PUBLIC_KEY, OFFRAMP_TOKEN_SHA256 and
    OFFRAMP_SERVICE_UID the admin port opens and signed plans are taken.
    """
    # The serving stack is the optional part `worker`; the other commands must not need it.
    from offramp_worker.logs import route_library_logs
    from offramp_worker.main import EXECUTOR_LOST, run
    from offramp_worker.settings import settings_from_env
    from offramp_worker.worker import ExecutorLostError

    route_library_logs()
    overrides = {"OFFRAMP_BUNDLE": str(bundle), "OFFRAMP_PORT": str(port), "OFFRAMP_HOST": host}
    if grpc_port is not None:
        overrides["OFFRAMP_GRPC_PORT"] = str(grpc_port)
    try:
        run(settings_from_env({**os.environ, **overrides}), stay_up_broken=False)
    except OfframpError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXECUTOR_LOST if isinstance(error, ExecutorLostError) else 2) from None
