"""The list of conditions and reasons, and the table of those with which nothing is wrong: from the registry in the
core."""

from __future__ import annotations

import re

from offramp_core.reasons import ConditionType, Reason, RequestOutcome, Tone
from website.build import DOCS

TROUBLESHOOTING = DOCS / "troubleshooting.md"
HEAD = """\
<!-- Generated from core/offramp_core/reasons.py by scripts/gen.d/docs; edit that instead. -->
# Conditions and reasons

Conditions of an EarlyExitService follow kstatus, so `kubectl wait`, Argo CD and Flux understand them. `Ready` is always there.
`Reconciling` and `Stalled` speak of what *you* changed and are absent otherwise: tuning in the background never disturbs the health that
GitOps tools see. Every word below is one of the code's own registry; its link leads to [Troubleshooting](../troubleshooting.md). The *tone* is
the colour on the page and in `offramp status`: good, neutral, warning (not as it should be, or not yet) or bad (a promise is not kept, or somebody must act).

```sh
kubectl wait earlyexitservice/digits --for=condition=Ready --timeout=10m
```

## Conditions

| condition | says |
|---|---|
"""
SECTIONS = (
    (
        ("worker", "kubelet"),
        "Workers that do not run",
        "Reasons of `Ready`, `WorkersAvailable`, `Reconciling` and `Stalled` that come from workers. Other words of "
        "the kubelet are passed on as they are.",
    ),
    (
        ("rollout",),
        "How rollouts end",
        "`status.reason` of a RampRollout, and `status.version.reason` of an EarlyExitService. One that was promoted "
        "has none.",
    ),
    (
        ("refusal",),
        "Plans that a worker refuses",
        "`status.reason` of a RampRollout, the worker's own `refused`, and the label `reason` of "
        "`earlyexit_plan_refusals_total`.",
    ),
    (("tuning",), "States of the tuner", "`status.tuning.state` of an EarlyExitService."),
    (
        ("event",),
        "Events",
        "`kubectl get events --field-selector involvedObject.kind=EarlyExitService`; `offramp up` prints them.",
    ),
)
NOTHING_WRONG = "## Nothing is wrong\n\n| reason | says |\n|---|---|\n"


def entries() -> dict[str, str]:
    """The entries of the troubleshooting page: what stands under each reason's heading, links as plain text."""
    parts = re.split(r"^### (\w+)\n\n", TROUBLESHOOTING.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {word: _plain(body.split("\n## ")[0]) for word, body in zip(parts[1::2], parts[2::2], strict=True)}


def _plain(text: str) -> str:
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(text.split()))


def page() -> str:
    """The whole page of conditions."""
    headings = set(entries())
    parts = [HEAD + "\n".join(f"| [`{kind}`](#{kind.lower()}) | {kind.meaning} |" for kind in ConditionType) + "\n"]
    for kind in ConditionType:
        parts.append(f"### {kind}\n\n| status | reason | tone | says | next |\n|---|---|---|---|---|")
        parts += [
            f"| {status} | {_row(reason, headings)}"
            for status in ("True", "False", "Unknown")
            for reason in sorted(Reason.at(f"{kind}={status}"))
        ]
        if kind in (ConditionType.READY, ConditionType.WORKERS_AVAILABLE, ConditionType.STALLED):
            status = "True" if kind is ConditionType.STALLED else "False"
            parts.append(f"| {status} | [a worker's reason](#workers-that-do-not-run) | | | |")
        parts.append("")
    for places, title, text in SECTIONS:
        parts.append(f"## {title}\n\n{text}\n\n| word | tone | says | next |\n|---|---|---|---|")
        parts.append("\n".join(f"| {_row(reason, headings)}" for reason in sorted(_at(places))) + "\n")
    parts.append(
        "## What became of a request\n\nThe label `outcome` of `earlyexit_requests_total` and `earlyexit_rows_total`.\n"
    )
    parts.append("| outcome | tone | says |\n|---|---|---|")
    parts.append(
        "\n".join(f"| `{outcome}` | {outcome.tone} | {outcome.meaning} |" for outcome in RequestOutcome) + "\n"
    )
    return "\n".join(parts)


def _at(places: tuple[str, ...]) -> set[Reason]:
    return {reason for place in places for reason in Reason.at(place)}


def _row(reason: Reason, headings: set[str]) -> str:
    anchor = reason.lower() if reason in headings else "nothing-is-wrong"
    link = f"[`{reason}`](../troubleshooting.md#{anchor})"
    return f"{link} | {reason.tone} | {reason.meaning} | {reason.next_step} |"


def troubleshooting() -> str:
    """The page as it is, with its last table made anew: reasons that need no entry, since nothing is wrong and nothing
    is to be done."""
    text, headings = TROUBLESHOOTING.read_text(encoding="utf-8"), set(entries())
    quiet = [r for r in Reason if r not in headings and r.tone in (Tone.GOOD, Tone.NEUTRAL) and not r.next_step]
    return text.split(NOTHING_WRONG)[0] + NOTHING_WRONG + "".join(f"| {r} | {r.meaning} |\n" for r in quiet)


def outputs() -> dict[str, str]:
    """Pages below ``docs`` and what they should say."""
    return {"reference/conditions.md": page(), "troubleshooting.md": troubleshooting()}
