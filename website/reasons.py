"""Every condition, reason, event and tuning state that the code can emit, read from the code itself.

Reasons are literals at known places: arguments of the calls that make conditions, events and endings, fields of that
name, and the (reason, message) pairs that functions return. Expressions are followed through ``a or b``, ``a if c else b`` and
tables; what comes from elsewhere (Kubernetes' own words, a worker's refusal) is named in :data:`PASSED_ON`, so a new way to
say something is noticed either way.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from offramp_core.control.gates import GATES

ROOT = Path(__file__).resolve().parent.parent
CODE = (
    "core/offramp_core/control",
    "operator/offramp_operator",
    "worker/offramp_worker/plans",
    "worker/offramp_worker/engine/ramp_sets.py",
    "worker/offramp_worker/worker.py",
)
WORD = re.compile(r"^[A-Z][A-Za-z0-9]*$")
CARRIED = re.compile(r"^\w+(\.\w+)*(\[.*\]|\.get\(.*\))$")  # an entry of a table that somebody else filled

# Expressions whose value is made elsewhere: what they can be is collected there.
PASSED_ON = {
    "reason": "a parameter or a pair returned by a function that is read as well",
    "refused.reason": "PlanRefusedError",
    "status.reason": "read back",
    "error.reason": "PlanRefusedError, or the API server's own word",
    "before.reason": "read back",
    "event.reason": "an Event read back",
    "endpoint.failure_reason": "carried along",
    "worker.failure_reason": "carried along",
    "problem.reason": "carried along",
    "update.reason": "next_update",
    "facts.update.reason": "next_update",
    "version.reason": "next_version",
    "scaling.failure_reason": "AnotherAutoscaler, or the HorizontalPodAutoscaler's own word",
    "trouble.reason": "RouteTrouble",
    "facts.turn.reason": "Turn",
    "self.reason": "carried along",
    "self.failure_reason": "carried along",
    "": "nothing to say",
}
# Expressions that stand for a few words.
STANDS_FOR = {
    "spec.mode": ("Disabled", "Pinned"),
    "outcome": ("RolledBack", "Aborted", "Superseded"),
    "status.verdict": ("RolledBack", "Aborted", "Superseded"),
}


# Decisions that make a condition True, and which argument is its reason.
CONDITION_OF = {"Update": ("WorkersUpdating", 1), "Version": ("VersionOnTrial", 1), "Turn": ("WorkersUpdating", 0)}
# Calls that say what is wrong with a route, and which argument is the reason.
ROUTE_TROUBLE = {"RouteTrouble": 0, "_remember_route": 2}


@dataclass(frozen=True, slots=True, order=True)
class Said:
    """One word that the code can emit. ``kind`` is condition, worker, rollout, refusal, event or tuning."""

    kind: str
    word: str
    where: str
    types: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()


@dataclass
class Found:
    """What was read. ``unknown`` are expressions that could not be followed, as ``file:line: expression``."""

    said: list[Said] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def words(self, *kinds: str) -> list[str]:
        """The distinct words of some kinds, sorted."""
        return sorted({s.word for s in self.said if s.kind in kinds})


def collect(root: Path = ROOT) -> Found:
    """Read the code."""
    found = Found()
    for place in CODE:
        path = root / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            _Reader(file.relative_to(root).as_posix(), found).visit(ast.parse(file.read_text(encoding="utf-8")))
    return found


class _Reader(ast.NodeVisitor):
    """Finds the places in one file."""

    def __init__(self, file: str, found: Found) -> None:
        self.file, self.found = file, found
        self.constants: dict[str, ast.expr] = {}
        self.functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []

    # --- where words stand --------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.functions.append(node)
        self.generic_visit(node)
        self.functions.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.functions.append(node)  # type: ignore[arg-type]
        self.generic_visit(node)
        self.functions.pop()

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        args = node.args
        if name in ("_condition", "Condition") and len(args) >= 4:
            self._condition(args)
        elif name in CONDITION_OF and len(args) > CONDITION_OF[name][1]:
            kind, place = CONDITION_OF[name]
            self._say("condition", args[place], types=(kind,), statuses=("True",))
        elif name == "Scaling" and len(args) >= 4:
            self._say("condition", args[3], types=("AutoscalingActive",), statuses=("False",))
        elif name in ROUTE_TROUBLE and len(args) > ROUTE_TROUBLE[name]:
            self._say("condition", args[ROUTE_TROUBLE[name]], types=("RouteAccepted",), statuses=("False",))
        elif name == "Event" and args:
            self._say("event", args[0])
        elif name in ("_stop", "_reject") and len(args) >= 3:
            self._say("rollout", args[2 if name == "_stop" else 1])
        elif name == "PlanRefusedError" and args:
            self._say("refusal", args[0])
        elif name == "Advice" and len(args) >= 4:
            self._say("worker", args[3])
        elif name == "_remember" and len(args) >= 3:
            self._say("worker", args[2])
        elif name == "_failed_endpoint" and len(args) >= 2:
            self._say("worker", args[1])
        for keyword in node.keywords:
            self._keyword(name, node, keyword)
        self.generic_visit(node)

    def _condition(self, args: list[ast.expr]) -> None:
        """A condition's type, status and reason; ``a if c else b`` twice over the same ``c`` goes in pairs."""
        if self.functions and self.functions[-1].name == "_condition":
            return
        types, status, reason = tuple(self._values(args[0])), args[1], args[2]
        if (
            isinstance(status, ast.IfExp)
            and isinstance(reason, ast.IfExp)
            and ast.dump(status.test) == ast.dump(reason.test)
        ):
            for s, r in ((status.body, reason.body), (status.orelse, reason.orelse)):
                self._say("condition", r, types=types, statuses=tuple(self._values(s)))
        else:
            self._say("condition", reason, types=types, statuses=tuple(self._values(status)))

    def _keyword(self, name: str, call: ast.Call, keyword: ast.keyword) -> None:
        if keyword.arg == "failure_reason":
            self._say("worker", keyword.value)
        elif keyword.arg == "reason" and name in ("replace", "RolloutStatus") and "control/" in self.file:
            self._say("rollout", keyword.value)
        elif (
            keyword.arg == "state"
            and name == "replace"
            and self.file.endswith("control/tuner.py")
            and "status" in ast.unparse(call.args[0])
        ):
            self._say("tuning", keyword.value)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """``status.get("reason") or "Failed"``: what Kubernetes says, else a word of our own."""
        if ast.unparse(node.values[0]).endswith(".get('reason')") and isinstance(node.values[-1], ast.Constant):
            self._say("worker", node.values[-1])
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target, value in _pairs(node):
            name = target.attr if isinstance(target, ast.Attribute) else ""
            if isinstance(target, ast.Name) and not self.functions:
                self.constants[target.id] = value
                if target.id.endswith("_REASONS") and isinstance(value, ast.Set):
                    for element in value.elts:
                        self._say("worker", element)
            elif name == "failure_reason":
                self._say("worker", value)
            elif name == "fell" and isinstance(value, ast.Tuple):
                self._say("rollout", value.elts[0])
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        annotation = ast.unparse(self.functions[-1].returns) if self.functions and self.functions[-1].returns else ""
        pair = annotation in ("tuple[str, str]", "tuple[str, str] | None")
        if (
            pair
            and isinstance(node.value, ast.Tuple)
            and "reason" in (ast.get_docstring(self.functions[-1]) or "reason")
        ):
            self._say("worker", node.value.elts[0])
        self.generic_visit(node)

    # --- what they are ------------------------------------------------------------------------------

    def _say(self, kind: str, node: ast.expr, *, types: tuple[str, ...] = (), statuses: tuple[str, ...] = ()) -> None:
        where = f"{self.file}:{node.lineno}"
        for word in self._values(node):
            if WORD.match(word):
                self.found.said.append(Said(kind, word, where, types, statuses))

    def _values(self, node: ast.expr) -> list[str]:
        """What an expression can be; what cannot be followed is noted."""
        text = ast.unparse(node)
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if text in STANDS_FOR:
            return list(STANDS_FOR[text])
        if isinstance(node, ast.JoinedStr) and text.endswith("}Rejected'"):
            return [f"{gate.__name__.capitalize()}Rejected" for gate in GATES]
        parts = self._parts(node)
        if not parts and text not in PASSED_ON and not CARRIED.match(text):
            self.found.unknown.append(f"{self.file}:{node.lineno}: {text}")
        return [value for part in parts for value in self._values(part)]

    def _parts(self, node: ast.expr) -> list[ast.expr]:
        """The expressions that an expression is one of."""
        if isinstance(node, ast.IfExp):
            return [node.body, node.orelse]
        if isinstance(node, ast.BoolOp):
            return node.values
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "str":
            return node.args
        return self._assigned(node.id) if isinstance(node, ast.Name) else []

    def _assigned(self, name: str) -> list[ast.expr]:
        """What a name is set to, in the function or else in the module, where that is an expression of one value."""
        if name in self.constants:
            return [self.constants[name]]
        if not self.functions:
            return []
        assigns = (n for n in ast.walk(self.functions[-1]) if isinstance(n, ast.Assign))
        values = [v for a in assigns for t, v in _pairs(a) if isinstance(t, ast.Name) and t.id == name]
        return [v for v in values if not (isinstance(v, ast.Name) and v.id == name)]


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of an assignment, tuples taken apart where both sides are tuples."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        elif not isinstance(target, ast.Tuple):
            yield target, node.value
