"""``offramp serve DIR...``: one worker in the foreground. Without a control plane nobody delivers a plan, so exits stay
off unless one is given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offramp_cli.edge import CoreOption, EdgesOption, OfflineOption, ResidueOption, UplinkOption, edge_variables
from offramp_cli.examples import with_examples
from offramp_core.errors import InvalidArgumentError, OfframpError

if TYPE_CHECKING:
    from offramp_worker.shared.settings import SharedSettings


@with_examples(
    "offramp serve build/demo/bundle",
    "offramp serve digits=build/digits faces=build/faces --memory 500000000",
    "offramp serve --models models.json",
    "kubectl get rampconfig NAME -o json > plan.json && offramp serve bundle --plan plan.json",
    "offramp serve bundle --edges --host 0.0.0.0",
    "offramp serve bundle --plan plan.json --core http://core:8080 --offline Answer",
)
def serve(  # noqa: PLR0917 - options of a command
    bundles: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DIR...",
            help="An exit bundle that `offramp prepare` wrote. Several share one executor; each has the name of its "
            "folder, or NAME in NAME=DIR.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(help="Port of the Open Inference Protocol; 0 takes a free one.", min=0, max=65535)
    ] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of the same protocol over gRPC; not opened unless given.", min=0, max=65535)
    ] = None,
    models: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file that lists several bundles, instead of DIR.")
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="Memory for several models: the least requested are unloaded, and loaded again on request.",
            min=1,
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A certified RampConfig in JSON, to serve one bundle with.")
    ] = None,
    core: CoreOption = None,
    uplink: UplinkOption = None,
    residue: ResidueOption = None,
    offline: OfflineOption = None,
    edges: EdgesOption = False,
) -> None:
    """Serve a bundle, or several, over the Open Inference Protocol v2.

    With --plan the exits of one plan are on. The worker audits a share of the requests, and switches exits off when
    more answers differ than the certificate allows. Nothing else checks or changes the plan.

    With --core this is an edge box: a worker that was started with --edges answers the rows that do not exit here.

    The OFFRAMP_ variables of the environment apply as well. With OFFRAMP_PUBLIC_KEY, OFFRAMP_TOKEN_SHA256 and
    OFFRAMP_SERVICE_UID the worker opens its admin port and accepts signed plans.
    """
    env = {**os.environ, "OFFRAMP_PORT": str(port), "OFFRAMP_HOST": host}
    own = {"OFFRAMP_GRPC_PORT": grpc_port, "OFFRAMP_FIXED_PLAN": plan, "OFFRAMP_MODELS_BYTES": memory}
    env |= {name: str(value) for name, value in own.items() if value is not None}
    env |= edge_variables(core=core, uplink=uplink, residue=residue, offline=offline, edges=edges)
    _run(env, bundles or [], file=models, several=models is not None or memory is not None)


def _run(env: dict[str, str], given: list[str], *, file: Path | None, several: bool) -> None:
    # The serving stack is the optional part `worker`; the other commands must not need it.
    from offramp_worker.logs import route_library_logs
    from offramp_worker.main import EXECUTOR_LOST, run, run_models
    from offramp_worker.settings import settings_from_env
    from offramp_worker.worker import ExecutorLostError

    route_library_logs()
    try:
        if len(given) == 1 and not several and not _named(given[0])[0]:
            run(settings_from_env({**env, "OFFRAMP_BUNDLE": given[0]}), stay_up_broken=False)
        else:
            run_models(_several(env, given, file=file), stay_up_broken=False)
    except OfframpError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXECUTOR_LOST if isinstance(error, ExecutorLostError) else 2) from None


def _several(env: dict[str, str], given: list[str], *, file: Path | None) -> SharedSettings:
    """Settings of the bundles that were given, each as DIR or NAME=DIR, or that a file lists."""
    from offramp_worker.shared.settings import ListedModel, settings_of_models, shared_settings

    if bool(given) == (file is not None):
        raise InvalidArgumentError("give bundles, or --models FILE which lists them")
    if file is not None:
        return shared_settings({**env, "OFFRAMP_MODELS": str(file)})
    listed = [ListedModel(name=name or Path(folder).name, bundle=folder) for name, folder in map(_named, given)]
    return settings_of_models(env, listed, folder=Path.cwd())


def _named(text: str) -> tuple[str, str]:
    """NAME=DIR as both, DIR with no name. A folder that is there is a DIR, whatever its name; a NAME has no slash."""
    name, _, folder = text.partition("=")
    return (name, folder) if folder and "/" not in name and not Path(text).is_dir() else ("", text)
