"""Every reason that the code can emit is documented, and nothing is documented that it cannot emit."""

from __future__ import annotations

from pathlib import Path

import pytest
from website.conditions import KUBERNETES, TYPES, documented, headings, words_of_workers
from website.reasons import CODE, Found, collect

KINDS = ("condition", "worker", "rollout", "refusal", "event", "tuning")


@pytest.fixture(scope="module")
def found() -> Found:
    return collect()


def test_every_reason_that_code_can_emit_has_an_entry_in_troubleshooting(found: Found) -> None:
    entries = documented()
    missing = {s.word: s.where for s in found.said if s.word not in entries}
    assert not missing, (
        f"docs/troubleshooting.md has no '### REASON' for {missing}; say what it means, what is still served, and what to do"
    )


def test_every_entry_is_about_something_that_code_can_emit(found: Found) -> None:
    extra = set(documented()) - set(found.words(*KINDS)) - words_of_workers()
    assert not extra, f"docs/troubleshooting.md documents {sorted(extra)}, which nothing emits any more"


def test_every_expression_that_makes_a_reason_can_be_followed(found: Found) -> None:
    assert found.unknown == [], (
        "website/reasons.py cannot follow these; write literals, or add them to PASSED_ON or STANDS_FOR"
    )


def test_every_condition_type_is_described(found: Found) -> None:
    assert {t for s in found.said for t in s.types} == set(TYPES)


def test_reasons_that_are_known_to_exist_are_found(found: Found) -> None:
    words = set(found.words(*KINDS))
    assert {
        "Serving",
        "PinRejected",
        "Unschedulable",
        "NameTaken",
        "AccuracyRejected",
        "DriftRejected",
        "AckTimeout",
        "UnknownRamp",
    } <= words


def test_every_entry_says_what_is_served_and_what_to_do() -> None:
    text = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    for part in text.split("\n### ")[1:]:
        name, body = part.split("\n", 1)
        body = body.split("\n## ")[0]
        refers = "As [" in body  # to an entry that says it
        assert refers or ("**Still served:**" in body and "**Next:**" in body), (
            f"{name}: says not what is served or what to do"
        )
    assert headings() >= set(KUBERNETES)


def test_a_new_reason_in_the_code_would_be_found(tmp_path: Path) -> None:
    for place in CODE:
        folder = (tmp_path / place).parent if place.endswith(".py") else tmp_path / place
        folder.mkdir(parents=True, exist_ok=True)
        if place.endswith(".py"):
            (tmp_path / place).write_text("")
    code = '''
def _ready(facts):
    """Docstring."""
    why = "FromAName" if facts else "Other"
    return _condition("Ready", "False", why or "NewReason", "…")

def failure(pod) -> tuple[str, str]:
    return "NewFailure", "…"

def stop(view):
    return _stop(view, "RolledBack", view.pick(), "…")
'''
    (tmp_path / "core/offramp_core/control/new.py").write_text(code)
    found = collect(tmp_path)
    assert found.words("condition") == ["FromAName", "NewReason", "Other"]
    assert found.words("worker") == ["NewFailure"]
    assert found.unknown == ["core/offramp_core/control/new.py:11: view.pick()"]
