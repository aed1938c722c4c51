"""``offramp`` and ``kubectl offramp``: thin commands over the packages that do the work."""

from __future__ import annotations

import sys

import typer

from offramp_cli.daytwo import pins, read, write
from offramp_cli.daytwo.lint import lint
from offramp_cli.plan import plan
from offramp_cli.prepare import prepare
from offramp_cli.replay import add_replay
from offramp_cli.serve import serve
from offramp_cli.triton import triton
from offramp_cli.up import up
from offramp_cli.verify import verify

app = typer.Typer(
    name="offramp",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Early-exit inference: certified ramps, canaried inside running workers.",
)
app.command()(prepare)
app.command()(serve)
app.command()(up)
add_replay(app)
app.command()(verify)
app.command()(plan)
app.command()(triton)
app.command()(lint)
for command in (
    read.get,
    read.status,
    read.why,
    read.history,
    read.diff,
    read.top,
    write.promote,
    write.abort,
    write.pause,
    write.resume,
    write.approve,
    write.tune,
    pins.export,
    pins.pin,
):
    app.command(rich_help_panel="Day two")(command)


def main() -> None:
    """Run the command line; Ctrl-C ends quietly."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
