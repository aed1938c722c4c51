"""Symbolic expressions, such as ``Symbol('s31', positive=True, integer=True)``: read, never evaluated.

SymPy's ``sympify`` is Python's ``eval``; what reaches it must be one of the forms that torch's printer writes. Powers
and shifts are bounded, because SymPy computes those of plain numbers at once.
"""

from __future__ import annotations

import ast
import re

SYMBOL = re.compile(r"[a-z]{1,8}[0-9]{1,6}")  # torch numbers its symbols: s31, u0, zuf1
FLOAT = re.compile(r"[-+]?[0-9.]{1,40}(e[-+]?[0-9]{1,3})?")
NAMES = frozenset({"oo", "zoo", "nan", "int_oo", "true", "false", "True", "False"})
ASSUMPTIONS = frozenset(
    {
        "integer",
        "positive",
        "nonnegative",
        "negative",
        "nonpositive",
        "nonzero",
        "zero",
        "real",
        "finite",
        "infinite",
        "rational",
        "extended_real",
        "commutative",
        "even",
        "odd",
    }
)
POWERS = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift", "RShift"})
FUNCTIONS = POWERS | {
    "Abs",
    "Add",
    "And",
    "CeilDiv",
    "CeilToInt",
    "CleanDiv",
    "Equality",
    "Eq",
    "ExprCondPair",
    "FloatTrueDiv",
    "FloorDiv",
    "FloorToInt",
    "Ge",
    "GreaterThan",
    "Gt",
    "Identity",
    "IntTrueDiv",
    "IsNonOverlappingAndDenseIndicator",
    "Le",
    "LessThan",
    "Lt",
    "Max",
    "Min",
    "Mod",
    "ModularIndexing",
    "Mul",
    "Ne",
    "Not",
    "Or",
    "Piecewise",
    "PythonMod",
    "RoundToInt",
    "StrictGreaterThan",
    "StrictLessThan",
    "ToFloat",
    "TruncToFloat",
    "TruncToInt",
    "Unequality",
    "Where",
    "ceiling",
    "floor",
}
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
NUMBERS = frozenset({"Integer", "Rational"})
MAX_LENGTH, MAX_DEPTH = 10_000, 60
MAX_NUMBER = 2**63
MAX_POWER = 64  # of all powers inside each other, multiplied


def check_expression(text: str) -> None:
    """Refuse what is not built of symbols, numbers, arithmetic, comparisons and torch's own functions.

    Raises
    ------
    ValueError
        Says what it holds instead.

    Examples
    --------
    >>> check_expression("Add(Symbol('s31', positive=True, integer=True), Integer(-1))")
    >>> check_expression("print(1)")
    Traceback (most recent call last):
    ...
    ValueError: calls print, which is no function of symbolic shapes
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"has {len(text)} characters; at most {MAX_LENGTH} are read")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("is no expression") from error
    _check(tree.body, depth=0, power=1)


def _check(node: ast.expr, *, depth: int, power: int) -> None:
    """Check one node and what is in it; ``power`` is the product of the exponents around it."""
    if depth > MAX_DEPTH:
        raise ValueError("is nested too deeply")
    match node:
        case ast.Constant(value=value):
            _check_number(value)
            parts: tuple[ast.expr, ...] = ()
        case ast.Name(id=name) if name in NAMES or SYMBOL.fullmatch(name):
            parts = ()
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            power, parts = _raised(power, right), (left,)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            power, parts = _checked_call(name, arguments, keywords, power=power)
        case _:
            parts = _operands(node)
    for part in parts:
        _check(part, depth=depth + 1, power=power)


def _operands(node: ast.expr) -> tuple[ast.expr, ...]:
    """The parts of arithmetic and comparisons."""
    match node:
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not(), operand=operand):
            return (operand,)
        case ast.BinOp(left=left, right=right, op=op) if isinstance(op, ARITHMETIC):
            return left, right
        case ast.Compare(left=left, ops=ops, comparators=others) if all(isinstance(op, COMPARISONS) for op in ops):
            return left, *others
        case ast.BoolOp(values=values):
            return tuple(values)
        case ast.Tuple(elts=elements):  # of a value and its condition, in Piecewise
            return tuple(elements)
    raise ValueError(f"holds {ast.unparse(node)[:80]!r}, which is no part of a symbolic shape")


def _checked_call(
    name: str, arguments: list[ast.expr], keywords: list[ast.keyword], *, power: int
) -> tuple[int, tuple[ast.expr, ...]]:
    """The power around its arguments, and those that are left to check."""
    if name == "Symbol":
        _check_symbol(arguments, keywords)
        return power, ()
    if name == "Float":
        _check_float(arguments, keywords)
        return power, ()
    if name not in FUNCTIONS | NUMBERS:
        raise ValueError(f"calls {name[:80]}, which is no function of symbolic shapes")
    if any(k.arg != "evaluate" or not isinstance(k.value, ast.Constant) for k in keywords):
        raise ValueError(f"calls {name} with {keywords[0].arg!r}, which it does not take")
    if name in POWERS:
        if len(arguments) != 2:
            raise ValueError(f"calls {name} with {len(arguments)} arguments; it takes two")
        return _raised(power, arguments[1]), (arguments[0],)
    if name in NUMBERS and not all(_integer(argument) is not None for argument in arguments):
        raise ValueError(f"calls {name} of what is no integer")
    return power, tuple(arguments)


def _check_symbol(arguments: list[ast.expr], keywords: list[ast.keyword]) -> None:
    match arguments:
        case [ast.Constant(value=str() as name)] if SYMBOL.fullmatch(name):
            pass
        case _:
            raise ValueError("has a symbol whose name is none of torch's, like s31")
    for keyword in keywords:
        match keyword:
            case ast.keyword(arg=str() as name, value=ast.Constant(value=bool())) if name in ASSUMPTIONS:
                pass
            case _:
                raise ValueError(f"assumes {str(keyword.arg)[:80]!r} of a symbol, which is no assumption of SymPy's")


def _check_float(arguments: list[ast.expr], keywords: list[ast.keyword]) -> None:
    match arguments:
        case [ast.Constant(value=str() as text)] if FLOAT.fullmatch(text):
            pass
        case _:
            raise ValueError("has a Float that is no decimal number")
    for keyword in keywords:
        if keyword.arg not in ("precision", "dps") or (_integer(keyword.value) or 0) not in range(1, 65):
            raise ValueError("has a Float of a precision that is no small number")


def _raised(power: int, exponent: ast.expr) -> int:
    """The power inside of one more; a rational exponent, such as that of a root, counts as the numbers in it."""
    match exponent:
        case ast.Call(func=ast.Name(id="Integer" | "Rational"), args=arguments, keywords=[]) if arguments:
            parts = [_integer(argument) for argument in arguments]
        case _:
            parts = [_integer(exponent)]
    values = [abs(part) for part in parts if part is not None]
    if len(values) != len(parts) or max(values) * power > MAX_POWER:
        raise ValueError(f"has a power or shift beyond {MAX_POWER}, or by what is no number")
    return power * max(1, *values)


def _integer(node: ast.expr) -> int | None:
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
            return -value
    return None


def _check_number(value: object) -> None:
    if not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise ValueError(f"has {str(value)[:80]!r}, which is no number in range")
