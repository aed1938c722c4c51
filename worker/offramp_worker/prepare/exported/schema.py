"""The JSON documents of an archive: which fields they have, and what may stand in each.

A *kind* takes a value and the path of its field, and returns what may be written again, or raises. Fields that are not
listed are left out: metadata, guards and module hierarchies, which torch would evaluate, resolve or paste into code,
are not needed for conversion. Names become identifiers of generated code, so they must be identifiers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from offramp_core.errors import InvalidArgumentError
from offramp_worker.prepare.exported.expressions import SYMBOL, check_expression
from offramp_worker.prepare.exported.operators import check_operator

Kind = Callable[[Any, str], Any]
Json = dict[str, Any]

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,999}")
PATH = re.compile(r"[A-Za-z0-9_-]{1,999}(\.[A-Za-z0-9_-]{1,999}){0,99}")
KEY = re.compile(r"[A-Za-z0-9_.: -]{0,999}")
PAYLOAD = re.compile(r"(weight|tensor|constant|custom_obj|opaque_obj)_[0-9]{1,9}")
NOTE = re.compile(r"[A-Za-z0-9_ .,:+/-]{0,999}")
MAX_INTEGER, MAX_TEXT = 2**63, 65_536
INFINITE = ("Infinity", "-Infinity", "NaN")  # as torch writes them
TREES = frozenset({"builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"})
DIALECTS = ("", "ATEN", "TRAINING")


def refused(where: str, why: str) -> InvalidArgumentError:
    """The error about a field of an archive."""
    return InvalidArgumentError(f"{where} {why}")


def _record(fields: Mapping[str, Kind], optional: Mapping[str, Kind] | None = None) -> Kind:
    """An object with these fields; others are left out."""

    def read(value: Any, where: str) -> Json:
        if not isinstance(value, dict):
            raise refused(where, "is no object")
        if missing := next((name for name in fields if name not in value), None):
            raise refused(f"{where}.{missing}", "is missing")
        kinds = {**fields, **(optional or {})}
        return {name: kind(value[name], f"{where}.{name}") for name, kind in kinds.items() if name in value}

    return read


def _union(**kinds: Kind) -> Kind:
    """An object with one field, whose name says what it holds."""

    def read(value: Any, where: str) -> Json:
        if not isinstance(value, dict) or len(value) != 1:
            raise refused(where, "must be an object with one field")
        ((name, held),) = value.items()
        if name not in kinds:
            raise refused(where, f"holds {name[:80]}, which is not read here; it must be one of {', '.join(kinds)}")
        return {name: kinds[name](held, f"{where}.{name}")}

    return read


def _list(kind: Kind) -> Kind:
    def read(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            raise refused(where, "is no list")
        return [kind(part, f"{where}[{index}]") for index, part in enumerate(value)]

    return read


def _map(key: Kind, kind: Kind) -> Kind:
    def read(value: Any, where: str) -> Json:
        if not isinstance(value, dict):
            raise refused(where, "is no object")
        return {key(name, where): kind(held, f"{where}.{name[:80]}") for name, held in value.items()}

    return read


def _or_none(kind: Kind) -> Kind:
    return lambda value, where: None if value is None else kind(value, where)


def _matching(pattern: re.Pattern[str], what: str) -> Kind:
    def read(value: Any, where: str) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value) or _is_special(value):
            raise refused(where, f"has {str(value)[:80]!r}, which {what}")
        return value

    return read


def _is_special(value: str) -> bool:
    """Whether a part of a dotted name means something to Python itself, as ``__class__`` does."""
    return any(part.startswith("__") and part.endswith("__") for part in value.split("."))


def _integer(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_INTEGER:
        raise refused(where, "is no integer of 64 bits")
    return value


def _number(value: Any, where: str) -> float | str:
    if value in INFINITE:
        return str(value)
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e308:
        raise refused(where, "is no number")
    return value


def _boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise refused(where, "is neither true nor false")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise refused(where, f"is no text of at most {MAX_TEXT} characters")
    return value


def _checked_by(check: Callable[[str], None]) -> Kind:
    def read(value: Any, where: str) -> str:
        text = _text(value, where)
        try:
            check(text)
        except ValueError as error:
            raise refused(where, str(error)) from error
        return text

    return read


def _nothing(_value: Any, _where: str) -> Json:
    return {}


def _tree(text: Any, where: str) -> str:
    """How arguments or results are nested: of tuples, lists and dictionaries alone, whatever else is registered."""
    try:
        protocol, spec = json.loads(_text(text, where))
    except (ValueError, TypeError, RecursionError) as error:
        raise refused(where, "is no tree of arguments") from error
    if protocol != 1:
        raise refused(where, "is a tree of arguments in a format that is not known")
    return json.dumps([1, _branch(spec, where)])


def _branch(spec: Any, where: str) -> Json:
    read = _record({"type": _or_none(_text), "context": _or_none(_text), "children_spec": _list(_branch)})(spec, where)
    if read["type"] is None:
        return {"type": None, "context": None, "children_spec": []}
    if read["type"] not in TREES:
        raise refused(
            where,
            f"nests values in {read['type'][:80]}; a program must take and return tensors, tuples, lists or "
            "dictionaries",
        )
    try:
        keys = json.loads(read["context"] or "null")
    except (ValueError, RecursionError) as error:
        raise refused(where, "is no tree of arguments") from error
    if keys is not None:
        keys = _list(_key)(keys, where)
    return {**read, "context": json.dumps(keys)}


def _within_graph(value: Any, where: str) -> Json:
    read: Json = GRAPH(value, where)
    return read


_name = _matching(NAME, "is no name")
_name_or_empty = _matching(re.compile(f"({NAME.pattern})?"), "is no name")
PARAMETER = _matching(PATH, "is no name of a parameter")
_key = _matching(KEY, "is no key")
_symbol = _matching(SYMBOL, "is no symbol like s31")
_expression = _record(
    {"expr_str": _checked_by(check_expression)},
    {"hint": _or_none(_union(as_int=_integer, as_bool=_boolean, as_float=_number))},
)
_sym_int = _union(as_expr=_expression, as_int=_integer)
_sym_float = _union(as_expr=_expression, as_float=_number)
_sym_bool = _union(as_expr=_expression, as_bool=_boolean)
_device = _record({"type": _matching(re.compile("[a-z]{1,20}"), "is no device")}, {"index": _or_none(_integer)})
_tensor_meta = _record(
    {
        "dtype": _integer,
        "sizes": _list(_sym_int),
        "requires_grad": _boolean,
        "device": _device,
        "strides": _list(_sym_int),
        "storage_offset": _sym_int,
        "layout": _integer,
    }
)
_tensor = _record({"name": _name})
_optional_tensor = _union(as_tensor=_tensor, as_none=_boolean)
_int_argument = _union(as_name=_name, as_int=_integer)
_float_argument = _union(as_name=_name, as_float=_number)
_bool_argument = _union(as_name=_name, as_bool=_boolean)
# Not read: custom objects, operators as arguments, and dictionaries of arguments.
_argument = _union(
    as_none=_boolean,
    as_tensor=_tensor,
    as_tensors=_list(_tensor),
    as_int=_integer,
    as_ints=_list(_integer),
    as_float=_number,
    as_floats=_list(_number),
    as_string=_text,
    as_strings=_list(_text),
    as_sym_int=_int_argument,
    as_sym_ints=_list(_int_argument),
    as_sym_float=_float_argument,
    as_sym_floats=_list(_float_argument),
    as_sym_bool=_bool_argument,
    as_sym_bools=_list(_bool_argument),
    as_scalar_type=_integer,
    as_memory_format=_integer,
    as_layout=_integer,
    as_device=_device,
    as_bool=_boolean,
    as_bools=_list(_boolean),
    as_graph=_record({"name": _name, "graph": _within_graph}),
    as_optional_tensor=_optional_tensor,
    as_optional_tensors=_list(_optional_tensor),
    as_nested_tensors=_list(_list(_tensor)),
    as_int_lists=_list(_list(_integer)),
    as_float_lists=_list(_list(_number)),
    as_complex=_record({"real": _number, "imag": _number}),
)
_node = _record(
    {
        "target": _checked_by(check_operator),
        "inputs": _list(_record({"name": _name_or_empty, "arg": _argument}, {"kind": _or_none(_integer)})),
        "outputs": _list(_argument),
        "metadata": _nothing,
    },
    {"is_hop_single_tensor_return": _or_none(_boolean), "name": _or_none(_name)},
)
GRAPH = _record(
    {
        "inputs": _list(_argument),
        "outputs": _list(_argument),
        "nodes": _list(_node),
        "tensor_values": _map(_name, _tensor_meta),
        "sym_int_values": _map(_name, _sym_int),
        "sym_bool_values": _map(_name, _sym_bool),
    },
    {"is_single_tensor_return": _boolean, "sym_float_values": _map(_name, _sym_float)},
)
_constant_value = _union(
    as_none=_boolean, as_int=_integer, as_float=_number, as_string=_matching(NOTE, "is no plain text"), as_bool=_boolean
)
_input_spec = _union(
    user_input=_record({"arg": _argument}),
    parameter=_record({"arg": _tensor, "parameter_name": PARAMETER}),
    buffer=_record({"arg": _tensor, "buffer_name": PARAMETER, "persistent": _boolean}),
    tensor_constant=_record({"arg": _tensor, "tensor_constant_name": PARAMETER}),
    constant_input=_record({"name": _name_or_empty, "value": _constant_value}),
)
_output_spec = _union(
    user_output=_record({"arg": _argument}),
    buffer_mutation=_record({"arg": _tensor, "buffer_name": PARAMETER}),
    parameter_mutation=_record({"arg": _tensor, "parameter_name": PARAMETER}),
    user_input_mutation=_record({"arg": _tensor, "user_input_name": _name}),
)
_call_signature = _record(
    {"inputs": _list(_argument), "outputs": _list(_argument), "in_spec": _tree, "out_spec": _tree},
    {"forward_arg_names": _or_none(_list(_name))},
)


def _root_module(value: Any, where: str) -> list[Json]:
    """The entry of the program itself; those of its modules are for taking it apart again."""
    if not isinstance(value, list) or not value:
        raise refused(where, "is no list of modules")
    read = _record({"fqn": _matching(re.compile(""), "not the program itself"), "signature": _call_signature})
    return [read(value[0], f"{where}[0]")]


PROGRAM = _record(
    {
        "graph_module": _record(
            {
                "graph": GRAPH,
                "signature": _record({"input_specs": _list(_input_spec), "output_specs": _list(_output_spec)}),
                "module_call_graph": _root_module,
            }
        ),
        "opset_version": _map(_name, _integer),
        "range_constraints": _map(_symbol, _record({"min_val": _or_none(_integer), "max_val": _or_none(_integer)})),
        "schema_version": _record({"major": _integer, "minor": _integer}),
    },
    {"verifiers": _list(_matching(re.compile("|".join(DIALECTS)), "is no dialect that is read"))},
)
PAYLOADS = _record(
    {
        "config": _map(
            PARAMETER,
            _record(
                {
                    "path_name": _matching(PAYLOAD, "is no file of the archive's own"),
                    "is_param": _boolean,
                    "use_pickle": _boolean,
                    "tensor_meta": _or_none(_tensor_meta),
                }
            ),
        )
    }
)
