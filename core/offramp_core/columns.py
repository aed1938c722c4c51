"""Which columns of wide records belong to which precision of the backbone.

A bundle may hold the backbone at other precisions besides fp32. All of them are recorded in one pass, so a row has, in
this order,

    ramps at the input          precision ""       every precision shares them
    ramps of the fp32 graph     precision "fp32"
    ramps of each other graph   its precision, and last what that whole backbone answers: ``<precision>/final``

A plan runs in one *chain*: the input ramps and the ramps of its own precision. Where no column names a precision, all
are one chain.
"""

from __future__ import annotations

from collections.abc import Sequence

from offramp_core.errors import InvalidArgumentError
from offramp_core.precision import EXACT, MOST_PRECISIONS, Precision, check_precision

FINAL_HEAD = "final"


def final_id(precision: Precision) -> str:
    """Name of the column with what the whole backbone of another precision answers.

    >>> final_id("int8")
    'int8/final'
    """
    return f"{precision}/{FINAL_HEAD}"


def other_precisions(of_columns: Sequence[str]) -> tuple[Precision, ...]:
    """The precisions besides the reference that have columns, in their order.

    >>> other_precisions(["", "fp32", "int8", "pruned50", "pruned50"])
    ('int8', 'pruned50')
    """
    return tuple(dict.fromkeys(p for p in of_columns if p not in ("", EXACT)))


def chain(of_columns: Sequence[str], precision: Precision) -> tuple[int, ...]:
    """Columns of a precision's ramps, input ramps first, without its final column.

    >>> chain(["", "fp32", "fp32", "int8", "int8"], "int8")
    (0, 3)
    """
    mine = [j for j, name in enumerate(of_columns) if name in ("", precision)]
    return tuple(mine if precision == EXACT else mine[:-1])


def final_column(of_columns: Sequence[str], precision: Precision) -> int:
    """Column with what the whole backbone of another precision answers: the last of its own."""
    return max(j for j, name in enumerate(of_columns) if name == precision)


def check_columns(ids: Sequence[str], of_columns: Sequence[str]) -> None:
    """Refuse columns that are not in order, share a name, or lack a precision's final column.

    Raises
    ------
    InvalidArgumentError
        Names the column.
    """
    others = other_precisions(of_columns)
    if len(others) >= MOST_PRECISIONS:
        raise InvalidArgumentError(
            f"columns are of {len(others) + 1} precisions; a bundle has at most {MOST_PRECISIONS}"
        )
    for name in others:
        check_precision(name)
    order = ("", EXACT, *others)
    ranks = [order.index(name) for name in of_columns]
    if len(ids) != len(ranks) or len(set(ids)) != len(ids) or ranks != sorted(ranks):
        raise InvalidArgumentError(
            f"columns {list(ids)} are of precisions {list(of_columns)}; names must differ, input ramps come first, "
            f"then those of {EXACT}, then of one other after another"
        )
    for precision in others:
        last = ids[final_column(of_columns, precision)]
        if last != final_id(precision):
            raise InvalidArgumentError(
                f"the last column of precision {precision!r} is {last!r}; it must be {final_id(precision)!r}"
            )
