"""What keeps `make test-fast` short and whole."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

TESTS = Path(__file__).parents[1]
TEST = re.compile(r"^ *(?:async )?def test_", re.MULTILINE)
LEFT_OUT = re.compile(r"^ *@pytest\.mark\.(?:slow|cluster|gpu)$", re.MULTILINE)

tried: list[int] = []


def test_a_file_whose_tests_are_all_slow_says_so_at_its_head_and_is_not_imported() -> None:
    texts = {path.relative_to(TESTS).as_posix(): path.read_text() for path in TESTS.rglob("test_*.py")}
    assert len(texts) > 100
    by_test = {file for file, text in texts.items() if 0 < len(TEST.findall(text)) <= len(LEFT_OUT.findall(text))}
    assert [file for file in sorted(by_test) if "\npytestmark = " not in texts[file]] == []


@settings(max_examples=60)
@given(st.integers())
def test_examples(number: int) -> None:
    tried.append(number)


def test_it_tries_fewer_examples_also_where_a_test_sets_their_number() -> None:
    """Runs behind the test above."""
    fast = settings.get_current_profile_name() == "fast"
    assert not tried or (len(tried) <= 25) == fast
