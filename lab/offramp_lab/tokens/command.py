"""What ``offramp replay`` does with files of tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from offramp_cli.npz import read_npz
from offramp_lab.tokens.judged import Judged, Limits, drawn, judged
from offramp_lab.tokens.records import Loss, TokenRecords, effects, token_records
from offramp_lab.tokens.rules import TOKEN_POLICIES, token_policy

ARRAYS = frozenset(
    {"uncertainty", "prediction", "final", "reference", "segment_seconds", "ramp_seconds", "answer", "time"}
)


@dataclass(frozen=True, slots=True)
class Draws:
    """How many calibrations are drawn, of how many answers (None: half of them)."""

    count: int
    answers: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class TokenFile:
    """What was found out on one file."""

    path: Path
    records: TokenRecords
    loss: Loss
    results: list[Judged]


def holds_tokens(path: Path) -> bool:
    """Whether a records file says which answer a row belongs to."""
    return "answer" in read_npz(path, only=frozenset({"answer"}))


def replay_tokens(path: Path, names: Sequence[str] | None, loss: Loss, limits: Limits, draws: Draws) -> TokenFile:
    """Rules calibrated on the older half of the answers and judged on the newer one."""
    policies = [token_policy(name) for name in dict.fromkeys(names or TOKEN_POLICIES)]
    records = token_records(read_npz(path, only=ARRAYS))
    seen, n = effects(records, loss), len(records)
    known, asked = np.arange(n // 2), np.arange(n // 2, n)
    results = [judged(seen, policy, limits, known=known, asked=asked) for policy in policies]
    if draws.count:
        found = drawn(seen, policies, limits, draws=draws.count, n=draws.answers or max(1, n // 2), seed=draws.seed)
        results = [replace(result, drawn=of) for result, of in zip(results, found, strict=True)]
    return TokenFile(path, records, loss, results)


def show_tokens(file: TokenFile, limits: Limits) -> None:
    """A table on standard output."""
    what = "answers of which a token differs" if file.loss == "answer" else "tokens that differ, mean over answers"
    heads = ["threshold", "saved", "loss", "leave early"]
    if any(result.drawn for result in file.results):
        heads += ["over budget", "saved, median"]
    table = Table(Column("policy", no_wrap=True), *heads)
    for result in file.results:
        of = result.drawn
        row = [result.policy.name, "off" if result.threshold is None else f"{result.threshold:.2f}"]
        row += [f"{share:.1%}" for share in (result.saving, result.loss, result.early)]
        table.add_row(*row, *([f"{of.broken} of {of.draws}", f"{of.saving:.1%}"] if of else []))
    console = Console()
    console.print(
        f"{file.path}: {len(file.records):,} answers, {len(file.records.tokens):,} tokens; loss: {what}; at most "
        f"{limits.budget:.1%} with {limits.confidence:.0%} confidence",
        highlight=False,
    )
    console.print(table)


def tokens_to_mapping(file: TokenFile, limits: Limits) -> dict[str, Any]:
    """The same for ``--json``."""
    return {
        "file": str(file.path),
        "answers": len(file.records),
        "tokens": len(file.records.tokens),
        "loss": file.loss,
        "budget": limits.budget,
        "confidence": limits.confidence,
        "policies": [_row(result) for result in file.results],
    }


def print_tokens(files: Sequence[TokenFile], limits: Limits, *, as_json: bool) -> None:
    """Tables, or JSON: a list for several files."""
    if as_json:
        mappings = [tokens_to_mapping(file, limits) for file in files]
        print(json.dumps(mappings[0] if len(mappings) == 1 else mappings, indent=2, allow_nan=False))
        return
    for file in files:
        show_tokens(file, limits)


def _row(result: Judged) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": result.policy.name,
        "describe": result.policy.describe,
        "threshold": result.threshold,
        "saving": result.saving,
        "loss": result.loss,
        "early": result.early,
    }
    if result.drawn is not None:
        row["draws"] = {
            "count": result.drawn.draws,
            "over_budget": result.drawn.broken,
            "median_saving": result.drawn.saving,
        }
    return row
