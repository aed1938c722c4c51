"""Every registered reason is documented and used, and nothing else is documented."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import parsed  # type: ignore[import-not-found]
import pytest
from parsed import ROOT
from website.conditions import TROUBLESHOOTING, entries

from offramp_core.reasons import ConditionType, Reason, RequestOutcome

REGISTRY = ROOT / "core" / "offramp_core" / "reasons.py"
PACKAGES = ("core/offramp_core", "operator/offramp_operator", "worker/offramp_worker", "cli/offramp_cli")
AS_IT_WAS_SAID = ("PassedOn", "parse_reason")


def nodes() -> Iterator[ast.AST]:
    """Every node of the code that says reasons."""
    for package in PACKAGES:
        for path, found in parsed.nodes_of(package).items():
            if path != REGISTRY:
                yield from found


def test_every_entry_of_the_troubleshooting_page_is_about_a_registered_reason_and_begins_with_its_meaning() -> None:
    said = entries()
    assert set(said) <= set(map(str, Reason)), "an entry is about something that nothing says"
    wrong = {word: Reason(word).meaning for word, body in said.items() if not body.startswith(Reason(word).meaning)}
    assert not wrong, f"these entries of {TROUBLESHOOTING} do not begin with the meaning that the registry has"


def test_every_reason_that_asks_for_something_has_an_entry() -> None:
    text = TROUBLESHOOTING.read_text()
    missing = [
        reason for reason in Reason if reason not in entries() and f"| {reason} | {reason.meaning} |" not in text
    ]
    assert not missing, "write '### REASON' in docs/troubleshooting.md: what it means, what is still served, what to do"


def test_every_entry_says_what_is_served_and_what_to_do() -> None:
    for word, body in entries().items():
        refers = "As [" in body or " As " in body or body.startswith("As ")  # to an entry that says it
        assert refers or ("**Still served:**" in body and "**Next:**" in body), (
            f"{word}: says not what is served or what to do"
        )


def test_every_registered_word_is_said_somewhere() -> None:
    """What the kubelet alone says is registered for its meaning; refusals of all kinds have series without being named
    there."""
    used = {
        (node.value.id, node.attr)
        for node in nodes()
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    words = [(Reason, r.name) for r in Reason if "kubelet" not in r.places]
    words += [(ConditionType, kind.name) for kind in ConditionType]
    words += [(RequestOutcome, outcome.name) for outcome in RequestOutcome]
    assert [name for kind, name in words if (kind.__name__, name) not in used] == []


def test_no_word_of_ours_is_passed_off_as_somebody_elses() -> None:
    calls = [
        n for n in nodes() if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in AS_IT_WAS_SAID
    ]
    assert calls and not [ast.unparse(c) for c in calls if any(isinstance(n, ast.Constant) for n in c.args)]


UNREGISTERED = """
from offramp_core.control.objects import Condition, TuningStatus
from offramp_core.control.snapshot import Event, WorkerEndpoint
from offramp_core.errors import DeliveryError, PlanRefusedError
from offramp_core.reasons import ConditionType, Reason, RequestOutcome

Condition(ConditionType.READY, "True", Reason.SERVING, "registered")
Condition(ConditionType.READY, "True", "NeverHeardOf", "")
Condition("NeverHeardOf", "True", Reason.SERVING, "")
Event("NeverHeardOf", "")
TuningStatus(state="NeverHeardOf")
WorkerEndpoint("a", "a", ready=False, failure_reason="NeverHeardOf")
PlanRefusedError("NeverHeardOf", "")
DeliveryError("NeverHeardOf", "", "")
"""


@pytest.mark.slow
def test_a_word_that_is_not_registered_is_an_error_of_type(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(UNREGISTERED)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports=silent", str(tmp_path / "says.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line]
    assert lines == list(range(8, 15)), done.stdout + done.stderr
