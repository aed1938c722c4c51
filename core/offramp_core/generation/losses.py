"""What an answer lost against the reference's answer to the same prompt: a number in [0, 1] of the whole answer.

Tokens of one answer depend on each other, so the unit of every test is the request. 0/1 losses are certified by the
binomial, the others by bets on bounded means (:mod:`offramp_core.evidence.betting`).

Sources: token F1 and its normalization are SQuAD's (Rajpurkar et al., 2016, arXiv:1606.05250); ROUGE-L is Lin (2004),
with equal weight of precision and recall; the longest common subsequence is computed by rows of bits (Hyyrö, 2004).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from offramp_core.errors import InvalidArgumentError

_WORDS = re.compile(r"\w+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)
MAX_PATTERN = 200


class Output(StrEnum):
    """What of an answer a budget is about: ``objective.accuracy.output``."""

    EXACT_ANSWER = "ExactAnswer"
    TOKEN_F1 = "TokenF1"  # noqa: S105 - a name
    ROUGE_L = "RougeL"


def exact_answer(served: str, reference: str, *, pattern: re.Pattern[str] | None = None) -> float:
    """1 where the answers differ, else 0. White space at both ends does not count.

    Parameters
    ----------
    pattern : re.Pattern, optional
        What of an answer counts: the last match, or its first group where it has one. An answer without a match counts
        as a whole.

    Examples
    --------
    >>> import re
    >>> exact_answer("so 6 and 7 make 42.", "It is 42.", pattern=re.compile(r"\\d+"))
    0.0
    """
    return float(_extracted(served, pattern) != _extracted(reference, pattern))


def token_f1(served: str, reference: str) -> float:
    """1 less the F1 of the words that both have, each as often as both have it.

    Words are SQuAD's: lower case, without punctuation and English articles. Two answers without words lose nothing, one
    of two all.

    Examples
    --------
    >>> token_f1("The cat sat.", "a cat sat"), round(token_f1("the cat", "the black cat"), 3)
    (0.0, 0.333)
    """
    ours, theirs = _normalized(served).split(), _normalized(reference).split()
    return _loss((Counter(ours) & Counter(theirs)).total(), len(ours), len(theirs))


def rouge_l(served: str, reference: str) -> float:
    """1 less the F1 of ROUGE-L: words in common that stand in the same order in both.

    Words are runs of letters and digits, in any script, lower case.

    Examples
    --------
    >>> round(rouge_l("police kill the gunman", "police killed the gunman"), 2)
    0.25
    """
    ours, theirs = _WORDS.findall(served.lower()), _WORDS.findall(reference.lower())
    return _loss(common_subsequence(ours, theirs), len(ours), len(theirs))


@dataclass(frozen=True, slots=True)
class AnswerLosses:
    """Every loss of one answer against the reference's; ``pattern`` is for :func:`exact_answer`."""

    pattern: re.Pattern[str] | None = None

    def __call__(self, served: str, reference: str) -> dict[Output, float]:
        return {
            Output.EXACT_ANSWER: exact_answer(served, reference, pattern=self.pattern),
            Output.TOKEN_F1: token_f1(served, reference),
            Output.ROUGE_L: rouge_l(served, reference),
        }


def answer_pattern(text: str) -> re.Pattern[str]:
    """Compile a declared pattern.

    Raises
    ------
    InvalidArgumentError
        It is longer than ``MAX_PATTERN`` characters, no pattern, or matches the empty answer.
    """
    if len(text) > MAX_PATTERN:
        raise InvalidArgumentError(f"the pattern of an answer has {len(text)} characters; at most {MAX_PATTERN}")
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise InvalidArgumentError(f"the pattern of an answer is no regular expression: {error}") from error
    if pattern.search("") is not None:
        raise InvalidArgumentError(f"the pattern {text!r} matches an empty text, so every answer would have a match")
    return pattern


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence, in about ``len(a) * len(b) / 64`` steps.

    Examples
    --------
    >>> common_subsequence("abcbdab", "bdcaba")
    4
    """
    where: dict[str, int] = {}
    for i, word in enumerate(a):
        where[word] = where.get(word, 0) | 1 << i
    every = (1 << len(a)) - 1
    rows = every
    for word in b:
        both = rows & where.get(word, 0)
        rows = (rows + both | rows - both) & every
    return len(a) - rows.bit_count()


def _loss(common: int, ours: int, theirs: int) -> float:
    if not ours or not theirs:
        return float(ours != theirs)
    return 1.0 - 2.0 * common / (ours + theirs)


def _normalized(text: str) -> str:
    kept = "".join(c for c in text.lower() if c not in _PUNCTUATION and unicodedata.category(c)[0] != "P")
    return _ARTICLES.sub(" ", kept)


def _extracted(answer: str, pattern: re.Pattern[str] | None) -> str:
    found = None
    if pattern is not None:
        for found in pattern.finditer(answer):  # noqa: B007 - the last one counts
            pass
    if found is None:
        return answer.strip()
    return (found[1] or "" if found.re.groups else found[0]).strip()
