"""``offramp replay``: what tuning policies would have done with recorded scores. The policies and the simulator are a
package of their own."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import typer

from offramp_cli.examples import with_examples

MISSING = (
    "error: `offramp replay` needs the package offramp_lab, which is not installed here\n"
    "hint: pip install 'offramp[replay]' has it with all it needs; images and folders of single packages leave it out"
)


def add_replay(app: typer.Typer) -> None:
    """Add the command, or one of its name that says what to install."""
    if find_spec("offramp_lab") is None:
        app.command("replay", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(missing)
        return
    from offramp_lab.replay.command import EXAMPLES, replay

    app.command()(with_examples(*EXAMPLES)(replay))


def missing() -> None:
    """Compare tuning policies on recorded scores (needs the package offramp_lab)."""
    print(MISSING, file=sys.stderr)
    raise typer.Exit(2)
