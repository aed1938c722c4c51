"""What the day-two commands share: options that choose the source, forms of output, errors as one line.

Exit codes: 0 done, 1 the answer is no (degraded, refused, different, wrong manifest), 2 timed out or wrong usage, 3
could not be asked.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal, NoReturn, ParamSpec, TextIO

import typer
import yaml
from rich.console import Console
from rich.text import Text

from offramp_cli.source.source import PLUGIN, Choice, RefusedError, Source, SourceError, choose
from offramp_core.control.codec import to_json
from offramp_core.errors import OfframpError
from offramp_operator.explain.family import Family

NO, TIMED_OUT, CANNOT = 1, 2, 3
Output = Literal["json", "yaml", "wide"]
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Session:
    """One run of a command. ``source`` is opened on first use of the property by :func:`day_two`; ``now`` is when it
    began."""

    source: Source
    output: Output | None
    choice: Choice
    now: float

    def show(self, lines: Callable[[], Sequence[Text]], data: Callable[[], Any]) -> None:
        """Print for a person or, with ``-o``, for a machine."""
        if self.output in ("json", "yaml"):
            print(formatted(data(), self.output), end="")
        else:
            print_lines(lines())

    @property
    def wide(self) -> bool:
        return self.output == "wide"

    def families(self, name: str | None) -> list[Family]:
        """All services, or the one of that name.

        Raises
        ------
        SourceError
            There is none of that name; the message lists what is there.
        """
        found = self.source.families(name)
        if name is not None and not found:
            raise SourceError(f"no EarlyExitService {name!r} in {self.source.where}; {self._there_is()}")
        return found

    def family(self, name: str | None) -> Family:
        """The service of that name; without one, the only one there is."""
        found = self.families(name)
        if len(found) != 1:
            raise SourceError(f"name one service in {self.source.where}; {self._there_is()}")
        return found[0]

    def _there_is(self) -> str:
        names = self.source.names()
        return (
            f"there is {', '.join(names[:10])}{', …' if len(names) > 10 else ''}"
            if names
            else "there is none: `kubectl apply` one, or `offramp up FILE`"
        )


def formatted(data: Any, output: str) -> str:
    """JSON or YAML text, ended by a newline."""
    if output == "json":
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    return str(yaml.safe_dump(to_json(data), sort_keys=False, allow_unicode=True, width=120))


def print_lines(lines: Sequence[Text], stream: TextIO | None = None) -> None:
    """Lines as they are: never wrapped, colours only on a terminal."""
    console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True, emoji=False, markup=False)
    for line in lines:
        console.print(line)


def fail(message: str, code: int) -> NoReturn:
    """One line on stderr."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(code)


def complete_names(context: typer.Context, incomplete: str) -> list[str]:
    """Names of services for the shell; nothing where they cannot be read."""
    given = {
        name: context.params.get(name)
        for name in ("state", "kubeconfig", "context", "namespace", "all_namespaces", "user")
    }
    try:
        choice = Choice(**{name: value for name, value in given.items() if value})
        return [name for name in choose(choice, program=_program()).names() if name.startswith(incomplete)]
    except Exception:  # whatever goes wrong, a shell that completes must not be filled with it
        return []


ServiceName = Annotated[
    str | None,
    typer.Argument(
        metavar="SERVICE",
        help="Name of an EarlyExitService; may be left out if there is only one.",
        autocompletion=complete_names,
    ),
]
OneService = Annotated[
    str, typer.Argument(metavar="SERVICE", help="Name of an EarlyExitService.", autocompletion=complete_names)
]

_SHARED = {
    "output": Annotated[
        Output | None, typer.Option("--output", "-o", help="json or yaml for machines, wide for more.")
    ],
    "as_json": Annotated[bool, typer.Option("--json", help="Same as -o json.")],
    "state": Annotated[
        Path | None,
        typer.Option("--state", metavar="DIR", help="State folder of `offramp up`.", rich_help_panel="Source"),
    ],
    "namespace": Annotated[
        str | None, typer.Option("--namespace", "-n", help="Namespace in the cluster.", rich_help_panel="Source")
    ],
    "all_namespaces": Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="All namespaces.", rich_help_panel="Source")
    ],
    "context": Annotated[
        str | None, typer.Option("--context", help="Context of the kubeconfig.", rich_help_panel="Source")
    ],
    "kubeconfig": Annotated[
        Path | None,
        typer.Option(
            "--kubeconfig",
            metavar="FILE",
            help="Kubeconfig; default KUBECONFIG, else the home folder's.",
            rich_help_panel="Source",
        ),
    ],
    "user": Annotated[
        str | None,
        typer.Option("--as", metavar="USER", help="User to impersonate in the cluster.", rich_help_panel="Source"),
    ],
}


def day_two(command: Callable[Concatenate[Session, P], None]) -> Callable[..., None]:
    """Give a command the shared options, and turn what goes wrong into one line and an exit code."""
    own = inspect.signature(command, eval_str=True)
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=_default(annotation))
        for name, annotation in _SHARED.items()
    ]

    @functools.wraps(command)
    def run(*arguments: Any, output: Output | None, as_json: bool, **options: Any) -> None:
        choice = Choice(**{name: options.pop(name) for name in Choice.__dataclass_fields__})
        try:
            source = choose(choice, program=_program())
            if choice.state is None and not choice.names_cluster:
                _print_default(source)
            session = Session(source, "json" if as_json else output, choice, time.time())
            command(session, *arguments, **options)
        except RefusedError as error:
            fail(str(error), NO)
        except OfframpError as error:
            fail(str(error), CANNOT)

    parameters = [*list(own.parameters.values())[1:], *shared]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _default(annotation: Any) -> Any:
    return False if annotation.__origin__ is bool else None


def _program() -> str:
    return Path(sys.argv[0]).name


def _print_default(source: Source) -> None:
    """A folder that is read because it lies here could be forgotten; on a terminal say so."""
    from offramp_cli.source.folder import FolderSource

    if isinstance(source, FolderSource) and sys.stderr.isatty():
        print(
            f"reading {source.where} of `offramp up`; -n NAMESPACE or --context NAME reads a cluster", file=sys.stderr
        )


__all__ = ["CANNOT", "NO", "PLUGIN", "TIMED_OUT", "Output", "Session", "day_two"]
