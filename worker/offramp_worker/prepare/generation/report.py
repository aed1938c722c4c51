"""What ``offramp prepare --task generate`` found: as values, as JSON, and on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offramp_worker.prepare.generation.measuring import Tally

NOT_WORTH_IT = "NotWorthIt"
WORTH = 0.95  # of the reference's time per token; whatever saves less is not worth what it takes to judge


@dataclass(frozen=True, slots=True)
class VariantLine:
    """A variant: ``agreement`` is the share of the reference's tokens that it writes too, ``time_ratio`` its time per
    token over the reference's."""

    name: str
    method: str
    megabytes: float
    agreement: float
    time_ratio: float
    refused: str = ""


@dataclass(frozen=True, slots=True)
class DraftLine:
    """A draft at one length, on prompts that nothing was fitted to."""

    draft: str
    tokens: int
    acceptance: float
    time_ratio: float
    proposed: int
    ties: int
    different: int


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """``refused`` says of each draft and variant that was left out why, with its figures. Seconds are those of one
    token by fp32 alone."""

    name: str
    source: str
    digest: str
    prompts: int
    answers: int
    reference_seconds: float
    variants: tuple[VariantLine, ...]
    drafts: tuple[DraftLine, ...]
    kept: tuple[str, ...]
    refused: dict[str, str]


def draft_line(draft: str, tokens: int, tally: Tally, reference: Tally) -> DraftLine:
    ratio = tally.token_seconds / max(reference.token_seconds, 1e-9)
    return DraftLine(
        draft, tokens, round(tally.acceptance, 4), round(ratio, 4), tally.proposed, tally.ties, tally.different
    )


def judged(lines: Sequence[DraftLine]) -> str:
    """Why a draft is left out, given what it did at every length; empty where it pays."""
    best = min(lines, key=lambda line: line.time_ratio)
    if wrong := sum(line.different for line in lines):
        return f"{wrong} answers differ from the reference's beyond ties"
    if best.time_ratio <= WORTH:
        return ""
    tried = ", ".join(
        f"{line.tokens}: {line.acceptance:.2f} accepted, {line.time_ratio:.2f} of the time" for line in lines
    )
    return (
        f"{NOT_WORTH_IT}: at its best {best.time_ratio:.2f} of fp32's time per token, more than {WORTH}; by draft "
        f"tokens: {tried}"
    )


def print_report(report: GenerationReport, console: Any) -> None:
    """Tables for people."""
    from rich.table import Table

    variants = Table("variant", "MB a token", "same tokens", "time per token", "", title=f"{report.name}: variants")
    for v in report.variants:
        variants.add_row(
            v.name, f"{v.megabytes:.1f}", f"{v.agreement:.1%}", f"{v.time_ratio:.2f}", v.refused or v.method
        )
    drafts = Table("draft", "tokens", "accepted", "time per token", title="drafts, verified by fp32")
    for d in report.drafts:
        drafts.add_row(d.draft, str(d.tokens), f"{d.acceptance:.1%}", f"{d.time_ratio:.2f}")
    console.print(variants, drafts)
    for name, why in report.refused.items():
        console.print(f"{name} is left out: {why}", highlight=False)
    console.print(f"{report.digest}", highlight=False)
