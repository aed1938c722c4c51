"""``offramp up FILE``: serve an EarlyExitService on this machine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.text import Text

from offramp_cli.edge import CoreOption, OfflineOption, ResidueOption, UplinkOption, edge_variables
from offramp_cli.manifest import load_intent, notes
from offramp_core.edge_settings import edge_settings
from offramp_core.errors import OfframpError
from offramp_core.reasons import Reason, Tone
from offramp_operator.local.embedded import EmbeddedShell
from offramp_operator.local.state import StateFolder
from offramp_operator.shell.log import LOGGER, record_facts

DEFAULT_STATE = Path(".offramp")
_STYLES = {"debug": "dim", "info": "", "warning": "yellow", "error": "bold red", "critical": "bold red"}
_GOOD_EVENTS = frozenset({"listening", "web", "worker-ready", *(r for r in Reason.at("event") if r.tone is Tone.GOOD)})


def up(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML file with one EarlyExitService.", exists=True, dir_okay=False)
    ],
    *,
    state: Annotated[
        Path | None,
        typer.Option(help="State folder; by default .offramp/NAME in the current folder.", file_okay=False),
    ] = None,
    port: Annotated[
        int, typer.Option(help="Port for clients on 127.0.0.1; 0 takes any free one.", min=0, max=65535)
    ] = 8080,
    web_port: Annotated[
        int | None,
        typer.Option(
            help="Port of the web page on 127.0.0.1; 0 takes any free one. By default 8082, if it is free.",
            min=0,
            max=65535,
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Port on 127.0.0.1 for Prometheus: /metrics of the control loop, /targets with the workers. Not "
            "opened unless given.",
            min=1,
            max=65535,
        ),
    ] = None,
    core: CoreOption = None,
    uplink: UplinkOption = None,
    residue: ResidueOption = None,
    offline: OfflineOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON lines.")] = False,
) -> None:
    """Serve FILE on this machine: worker processes, one address, a web page, and the same control loop as in a cluster.

    FILE is applied again whenever it changes. Ctrl-C drains and stops; starting again with the same state folder
    goes on where it stopped. With --core this machine is an edge box.

    Exit codes: 0 after a clean stop, 2 for a file, folder or port that cannot be used.
    """
    try:
        intent = load_intent(file)
        edge = edge_variables(core=core, uplink=uplink, residue=residue, offline=offline)
        edge_settings(edge)  # refused here, before a worker would
        _log_events(sys.stdout, as_json=as_json)
        folder = StateFolder(state if state is not None else DEFAULT_STATE / intent.name)
        with folder.exclusive():
            asyncio.run(_serve(file, folder, edge=edge, port=port, web_port=web_port, metrics_port=metrics_port))
    except (OfframpError, OSError) as error:
        _fail(file, error)


async def _serve(
    file: Path,
    folder: StateFolder,
    *,
    edge: dict[str, str],
    port: int,
    web_port: int | None,
    metrics_port: int | None,
) -> None:
    for note in notes(load_intent(file)):
        LOGGER.warning("%s", note, extra={"event": "ignored"})
    read = partial(load_intent, file, bundles=folder.bundles)
    shell = EmbeddedShell(read, folder, port=port, web_port=web_port, metrics_port=metrics_port, edge=edge)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _ask_to_stop, stop)
    await shell.run(stop)


def _ask_to_stop(stop: asyncio.Event) -> None:
    """The first signal drains. A second one ends this process at once; the kernel then ends the workers."""
    if stop.is_set():
        os._exit(130)
    stop.set()


def _fail(file: Path, error: Exception) -> None:
    """One line and exit code 2."""
    reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    typer.echo(f"offramp up: {file}: {reason}", err=True)
    raise typer.Exit(2) from error


# --- telling what happens --------------------------------------------------------------------------


def _log_events(stream: TextIO, *, as_json: bool) -> None:
    handler: logging.Handler = _JsonEvents(stream) if as_json else _EventLines(stream)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    LOGGER.setLevel(logging.INFO)


class _JsonEvents(logging.Handler):
    """One JSON object per line."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        print(json.dumps(record_facts(record), default=str, ensure_ascii=False), file=self._stream, flush=True)


class _EventLines(logging.Handler):
    """One line per event for people: time, event, message; colours only on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._console = Console(file=stream, highlight=False, soft_wrap=True)

    def emit(self, record: logging.LogRecord) -> None:
        facts: dict[str, Any] = record_facts(record)
        clock = logging.Formatter().formatTime(record, "%H:%M:%S")
        style = "green" if facts["event"] in _GOOD_EVENTS else _STYLES.get(facts["level"], "")
        line = Text.assemble(
            (f"{clock}  ", "dim"), (f"{facts['event']:<18} ", style), " ".join(facts["message"].split())
        )
        self._console.print(line)
