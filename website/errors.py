"""The error tree, from ``offramp_core.errors``."""

from __future__ import annotations

import inspect

from offramp_core import errors

HEAD = """\
<!-- Generated from core/offramp_core/errors.py by scripts/gen.d/docs; edit that instead. -->
# Errors

Everything that Offramp raises on purpose derives from one class. A message is one line: which field or file, the value, what is
allowed, and what to do next. The command line prints it on stderr and ends with the exit code of the [command](../cli.md).
What goes wrong in a cluster is reported by [conditions](conditions.md) instead.
"""


def outputs() -> dict[str, str]:
    """Pages below ``docs`` and what they should say."""
    tree = inspect.cleandoc(errors.__doc__ or "")
    parts = [HEAD, f"```text\n{tree.split(chr(10) * 2, 1)[1].split(chr(10) * 2)[0]}\n```\n"]
    for name, error in vars(errors).items():
        if inspect.isclass(error) and issubclass(error, errors.OfframpError):
            base = error.__mro__[1].__name__
            parts.append(f"## {name}\n\nFrom `{base}`. {_markdown(inspect.getdoc(error) or '')}\n")
    parts.append(tree.rsplit("\n\n", 1)[1].replace("``", "`") + "\n")
    return {"reference/errors.md": "\n".join(parts)}


def _markdown(text: str) -> str:
    return text.replace("``", "`")
