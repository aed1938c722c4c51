"""Frozen dataclasses to and from the JSON of the Kubernetes API.

Field names become camelCase, ``*_at`` floats (seconds since the epoch) become RFC 3339 text, and fields that
hold their default are left out, so a status that says nothing is an empty object.
"""

from __future__ import annotations

import reprlib
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from offramp_core.errors import InvalidArgumentError

T = TypeVar("T")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def camel(name: str) -> str:
    """``step_started_at`` → ``stepStartedAt``."""
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def format_time(seconds: float) -> str:
    """Seconds since the epoch as RFC 3339 text in UTC, to the microsecond."""
    return (_EPOCH + timedelta(seconds=seconds)).isoformat(timespec="microseconds").replace("+00:00", "Z")


def parse_time(text: str) -> float:
    """RFC 3339 text as seconds since the epoch."""
    try:
        return (datetime.fromisoformat(text.replace("Z", "+00:00")) - _EPOCH).total_seconds()
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(f"time {text!r} is not RFC 3339, e.g. 2026-11-21T12:00:00Z") from error


def to_json(value: Any) -> Any:
    """A dataclass (or a container of them) as plain JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            camel(f.name): to_json(format_time(item) if _is_time(f.name, item) else item)
            for f in fields(value)
            if (item := getattr(value, f.name)) != _default(f)
        }
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, StrEnum):
        return value.value
    return value


def from_json(kind: type[T], value: Any) -> T:
    """The inverse of :func:`to_json`. Unknown fields are ignored, as a newer writer may know more.

    Raises
    ------
    InvalidArgumentError
        A value has the wrong type; the message names the field.
    """
    parse: Parser = _parser(cast(Hashable, kind))
    return cast(T, parse(value, kind.__name__))


Parser = Callable[[Any, str], Any]
"""Makes a value of some type from JSON; told where the value stands."""


@cache
def _parser(kind: Any) -> Parser:
    """What reads a type. Made once for each: every pass over every service parses statuses."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _optional(_parser(next(a for a in arguments if a is not type(None))))
    if is_dataclass(kind):
        return _dataclass(cast(type, kind))
    if origin is tuple:
        return _tuple(_parser(arguments[0]))
    if origin is dict:
        return _dict(_parser(arguments[1]))
    if origin is Literal:
        return _choice(arguments)
    return _scalar(kind)


def _optional(parse: Parser) -> Parser:
    return lambda value, where: None if value is None else parse(value, where)


def _tuple(parse: Parser) -> Parser:
    return lambda value, where: tuple(parse(item, f"{where}[{i}]") for i, item in enumerate(_check(value, list, where)))


def _dict(parse: Parser) -> Parser:
    return lambda value, where: {key: parse(item, f"{where}.{key}") for key, item in _check(value, dict, where).items()}


def _choice(options: tuple[Any, ...]) -> Parser:
    def parse(value: Any, where: str) -> Any:
        if value not in options:
            raise InvalidArgumentError(f"{where} is {value!r}; it must be one of {list(options)}")
        return value

    return parse


def _word(words: type[StrEnum]) -> Parser:
    """A known word, or one of another release as it was said."""
    known: Mapping[str, StrEnum] = {word.value: word for word in words}

    def parse(value: Any, where: str) -> Any:
        word: str = _check(value, str, where)
        return known.get(word, word)

    return parse


def _scalar(kind: Any) -> Parser:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _word(kind)
    if kind is float:
        return lambda value, where: float(_check(value, (int, float), where))
    return lambda value, where: value if kind is Any else _check(value, kind, where)


def _dataclass(kind: type) -> Parser:
    hints = get_type_hints(kind)
    known = [(f.name, camel(f.name), _parser(hints[f.name])) for f in fields(kind)]

    def parse(value: Any, where: str) -> Any:
        given = _check(value, dict, where)
        arguments = {}
        for field_name, name, parse_item in known:
            if name in given:
                item = given[name]
                if field_name.endswith("_at") and isinstance(item, str):
                    item = parse_time(item)
                arguments[field_name] = parse_item(item, f"{where}.{name}")
        try:
            return kind(**arguments)
        except TypeError as error:
            raise InvalidArgumentError(f"{where}: {error}") from error

    return parse


def _check(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        shown = reprlib.repr(value)  # it may be anything, and of any size
        raise InvalidArgumentError(f"{where} is {shown}; expected {getattr(kind, '__name__', kind)}")
    return value


def _default(f: Field[Any]) -> Any:
    if f.default is not MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not MISSING else MISSING


def _is_time(name: str, value: Any) -> bool:
    return name.endswith("_at") and isinstance(value, float)
