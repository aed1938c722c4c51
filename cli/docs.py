"""Write (or with --check compare) docs/cli.md: every command with its help, arguments and options, from the commands
themselves."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperArgument, TyperGroup

from offramp_cli.main import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
HEAD = """\
# The command line

`offramp COMMAND --help` prints the same. `kubectl offramp COMMAND` is the same program as a kubectl plugin (`kubectl-offramp`); it always reads a
cluster. `offramp --install-completion` completes commands, options and names of services. This page is generated: `make gen`.

The day-two commands (`get` to `pin`) read one of two sources: a cluster, with the kubeconfig, context and namespace that kubectl would use, or the
state folder of `offramp up`. `--state DIR` selects a folder, and any flag about a cluster selects the cluster. Without either, they read `.offramp` in the current
folder if it exists, else the cluster. The default output is text for people, with colors only on a terminal; `-o json` and `-o yaml` are for machines.

Their exit codes: 0 done; 1 the answer is no (degraded, refused, different, a wrong manifest); 2 timed out, or wrong usage; 3 there is no answer
(no cluster, unknown name, not allowed). An error is one line on stderr that says what to do next.

They write only `spec.decision` and `spec.paused` of a RampRollout (promote, approve, abort, pause, resume), and the annotation
`earlyexit.dev/request` on your own service (tune), which the operator answers once. No command writes your spec. In a cluster they need the verbs
`get` and `list` on earlyexitservices, rampconfigs and ramprollouts, `patch` on ramprollouts or earlyexitservices to decide, and `list` on pods to see them.
"""
CONTEXT = typer.Context(typer.main.get_command(app))
SHARED = ("output", "as_json", "state", "namespace", "all_namespaces", "context", "kubeconfig", "user")


def page() -> str:
    """The whole page."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    commands = dict(group.commands)
    parts = [HEAD]
    shared = [p for p in commands["get"].params if p.name in SHARED]
    parts += ["## Options of all day-two commands\n", _options(shared)]
    for name, command in commands.items():
        own = [p for p in command.params if p.name not in SHARED or not _is_day_two(command)]
        parts.append(f"## offramp {name}\n")
        parts.append(_help(command.help or ""))
        parts.append(_options(own))
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _is_day_two(command: object) -> bool:
    return {p.name for p in getattr(command, "params", ())} >= set(SHARED)


def _help(text: str) -> str:
    """Paragraphs; what follows ``Example`` is code."""
    prose, _, code = inspect.cleandoc(text.replace("\f", "")).partition("\nExample")
    lines = [line.strip() for line in code.split("\n")[1:] if line.strip()]
    return prose.strip() + "\n" + ("\n```sh\n" + "\n".join(lines) + "\n```\n" if lines else "")


def _options(parameters: list[Any]) -> str:
    rows = [_row(p) for p in parameters if p.name != "help"]
    return "" if not rows else "| | |\n|---|---|\n" + "\n".join(rows) + "\n"


def _row(parameter: Any) -> str:
    """Names and help, as ``--help`` has them."""
    if isinstance(parameter, TyperArgument):
        return f"| `{parameter.metavar or str(parameter.name).upper()}` | {_cell(parameter.help)} |"
    record = parameter.get_help_record(CONTEXT)
    return f"| `{_cell(record[0])}` | {_cell(record[1])} |"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def main() -> None:
    """Write the page, or fail where it has drifted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit("docs/cli.md has drifted from the commands; run 'make gen'")


if __name__ == "__main__":
    main()
