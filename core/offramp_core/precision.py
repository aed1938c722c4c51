"""Precisions of a backbone: names that a bundle gives to forms of one model, which nothing here has to know.

A bundle declares each of them with the graph that computes it, how that was made, and what it costs
(:mod:`offramp_core.bundle`). Records have columns of each (:mod:`offramp_core.columns`), a plan names the one that it
runs at. One of them is the *reference*: the model as the user gave it, whose answers are right by definition and which
answers where exits are off. It is called the same everywhere, so that exits off can be told from a plan alone, without
its bundle.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from offramp_core.errors import InvalidArgumentError

Precision: TypeAlias = str  # of the form below; core compares names and never reads them
EXACT: Precision = "fp32"  # the reference
MOST_PRECISIONS = 16  # of one bundle, with the reference: every audit runs them all
_NAME = re.compile(r"[a-z0-9]{1,16}")  # it begins ids of ramps and names of arrays: no '/' and no '_'


def check_precision(name: Any) -> Precision:
    """A name that a precision may have: 1 to 16 lower-case letters and digits, such as int8 or pruned50.

    Raises
    ------
    InvalidArgumentError
        It has another form.

    Examples
    --------
    >>> check_precision("pruned50")
    'pruned50'
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"precision {str(name)[:80]!r} is no name; write 1 to 16 lower-case letters and digits, such as int8"
        )
    return name
