"""The rules of the CRDs, evaluated here as the API server does on creation: CEL, list types, and defaults before both.

CEL itself is the library's; what Kubernetes adds to it and our rules use is :data:`_FUNCTIONS`, after
https://kubernetes.io/docs/reference/using-api/cel/. A function that is missing there makes its rule fail, never pass.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

Path = tuple[str | int, ...]
Broken = tuple[Path, str]

_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_NAME = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d+)|([numkMGTPE]|[KMGTPE]i)?)")
_UNITS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def defaulted(schema: Mapping[str, Any], value: Any) -> Any:
    """A value as the API server completes it: missing fields take the schema's defaults, level by level, and a known
    one that is null is missing."""
    if isinstance(value, Mapping):
        known = schema.get("properties") or {}
        kept = {name: each for name, each in value.items() if each is not None or name not in known}
        given = {**{name: each["default"] for name, each in known.items() if "default" in each}, **kept}
        others = schema.get("additionalProperties")
        inner = others if isinstance(others, Mapping) else {}
        return {name: defaulted(known.get(name, inner), each) for name, each in given.items()}
    if isinstance(value, list):
        return [defaulted(schema.get("items") or {}, each) for each in value]
    return value


def broken_rules(schema: Mapping[str, Any], value: Any, *, spare: Sequence[Path] = ()) -> list[Broken]:
    """Where a value, with its defaults, breaks rules that say more than its schema.

    Parameters
    ----------
    schema : mapping
        A structural schema as in a CRD.
    spare : sequence of paths
        What is known to be malformed: rules over it, or over something around it, are not evaluated.
    """
    return [
        (path, message)
        for path, rule in _rules(schema, value, ())
        if not any(bad[: len(path)] == path for bad in spare) and (message := rule())
    ]


def _rules(schema: Mapping[str, Any], value: Any, path: Path) -> Iterator[tuple[Path, Callable[[], str]]]:
    """Every rule that applies to a value or something in it, outermost first."""
    for rule in schema.get("x-kubernetes-validations") or ():
        if "oldSelf" not in rule["rule"]:  # that one is about changes
            yield path, functools.partial(_rule_message, rule, value)
    if isinstance(value, Mapping):
        others = schema.get("additionalProperties")
        inner = others if isinstance(others, Mapping) else {}
        for name, each in value.items():
            yield from _rules((schema.get("properties") or {}).get(name, inner), each, (*path, str(name)))
    elif isinstance(value, list):
        yield path, functools.partial(_repeated, schema, value)
        for i, each in enumerate(value):
            yield from _rules(schema.get("items") or {}, each, (*path, i))


def _rule_message(rule: Mapping[str, str], value: Any) -> str:
    """The rule's sentence where a value breaks it; empty where it does not."""
    import cel

    try:
        held = _program(rule["rule"]).execute(
            cel.Context(variables={"self": value, "format": ""}, functions=_FUNCTIONS)
        )
    except Exception as error:  # the library has no base class of its own
        return f"{rule.get('message', rule['rule'])} (the rule cannot be evaluated: {error})"
    return "" if held is True else rule.get("message", f"failed rule: {rule['rule']}")


@functools.cache
def _program(text: str) -> Any:
    import cel

    return cel.compile(text)


def _repeated(schema: Mapping[str, Any], items: Sequence[Any]) -> str:
    kind = schema.get("x-kubernetes-list-type")
    if kind not in ("set", "map"):
        return ""
    keys = schema.get("x-kubernetes-list-map-keys") or ()
    seen = []
    for item in items:
        mark = [item.get(key) for key in keys] if kind == "map" and isinstance(item, Mapping) else item
        if mark in seen:
            repeated = ", ".join(map(str, mark)) if isinstance(mark, list) else str(mark)
            return f"{repeated} stands there twice"
        seen.append(mark)
    return ""


# --- what Kubernetes adds to CEL -------------------------------------------------------------------


def _quantity(text: str) -> Decimal | None:
    found = _QUANTITY.fullmatch(text)
    if found is None:
        return None
    number, exponent, unit = Decimal(found[1]), found[2], found[3] or ""
    if exponent is not None:
        return number.scaleb(int(exponent)) if len(exponent) < 4 else None
    return number * 1024 ** ("KMGTPE".index(unit[0]) + 1) if unit.endswith("i") else number.scaleb(_UNITS[unit])


def _parsed(text: str) -> Decimal:
    value = _quantity(text)
    if value is None:
        raise ValueError(f"{text!r} is no quantity")
    return value


def _checked_quantity(text: str) -> str:
    _parsed(text)
    return text


def _compare(a: str, b: str) -> int:
    x, y = _parsed(a), _parsed(b)
    return (x > y) - (x < y)


def _qualified(text: str) -> bool:
    prefix, slash, name = text.rpartition("/")
    return _matches(_NAME, name, 63) and (not slash or _matches(_SUBDOMAIN, prefix, 253))


def _matches(pattern: str, text: str, longest: int) -> bool:
    return len(text) <= longest and re.fullmatch(pattern, text) is not None


def is_subdomain(text: str) -> bool:
    """Whether a text can be the name of an object."""
    return _matches(_SUBDOMAIN, text, 253)


_FORMATS: dict[str, Callable[[str], bool]] = {
    "dns1123Subdomain": is_subdomain,
    "qualifiedName": _qualified,
    "labelValue": lambda text: text == "" or _matches(_NAME, text, 63),
}


def _validate(form: str, text: str) -> Any:
    """The complaints about a text, or none, as an optional."""
    import cel

    return cel.OptionalValue.none() if _FORMATS[form](text) else cel.OptionalValue.of([f"not a {form}"])


def _named(form: str) -> Callable[[Any], str]:
    return lambda _: form


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "isSorted": lambda items: all(a <= b for a, b in itertools.pairwise(items)),
    "sum": sum,
    "isQuantity": lambda text: _quantity(text) is not None,
    "quantity": _checked_quantity,
    "compareTo": _compare,
    "isLessThan": lambda a, b: _compare(a, b) < 0,
    "isGreaterThan": lambda a, b: _compare(a, b) > 0,
    "validate": _validate,
    **{form: _named(form) for form in _FORMATS},
}
