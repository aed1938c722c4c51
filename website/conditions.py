"""The list of conditions and reasons, from the code (:mod:`website.reasons`), with what ``docs/troubleshooting.md`` says of each."""

from __future__ import annotations

import re

from website.build import DOCS
from website.reasons import Found, Said, collect

HEAD = """\
<!-- Generated from the code and docs/troubleshooting.md by scripts/gen.d/docs; edit those instead. -->
# Conditions and reasons

Conditions of an EarlyExitService follow kstatus, so `kubectl wait`, Argo CD and Flux understand them. `Ready` is always there.
`Reconciling` and `Stalled` speak of what *you* changed and are absent otherwise: tuning in the background never disturbs the health that
GitOps tools see. Every word below is read from the code; its link leads to [Troubleshooting](../troubleshooting.md).

```sh
kubectl wait earlyexitservice/digits --for=condition=Ready --timeout=10m
```

## Conditions

| condition | says |
|---|---|
"""
TYPES = {
    "Ready": "At least one worker answers under a plan. False only while nobody does.",
    "WorkersAvailable": "As many workers are ready as `spec.replicas`, or an autoscaler, asks for.",
    "LatencyObjectiveMet": "The latency objective, measured from admission to reply under the stable plan. It informs; it rolls nothing back.",
    "AccuracyWithinBudget": "The accuracy budget, by audits of the stable plan.",
    "NoExitCapacity": "Whether the ready workers answer the peak of the last hour when exits go off. A forecast: it degrades no health.",
    "WorkersQuarantined": "There while some worker's counts are not pooled.",
    "ExitsCostTime": "There while a pinned plan takes more time than exits off, by its holdback. It informs; a tuned plan is switched off instead.",
    "RampTraining": "There, and False, while something keeps ramps from being trained on live traffic. It degrades no health.",
    "WorkersUpdating": "There while workers with another bundle or image replace those that serve; False once the only one was replaced, with the length of the interruption.",
    "VersionOnTrial": "There while two versions of the model serve side by side (`spec.updatePolicy.sideBySide`).",
    "RouteAccepted": "There, and False, while requests through a Gateway are not shared by weight although `spec.updatePolicy.sideBySide.gateway` asks for it.",
    "AutoscalingActive": "There while an autoscaler cannot do its work. A HorizontalPodAutoscaler's own words are passed on.",
    "Reconciling": "There while the newest generation is not served as asked.",
    "Stalled": "There when the newest generation cannot be served as asked and waiting will not help.",
}
KUBERNETES = (
    "ImagePullBackOff",
    "ErrImagePull",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CrashLoopBackOff",
    "OOMKilled",
    "Evicted",
)
SECTIONS = (
    ("worker", "Workers that do not run", "Reasons of `Ready`, `WorkersAvailable`, `Reconciling` and `Stalled` that come from workers. Other words of the kubelet are passed on as they are."),
    ("rollout", "How rollouts end", "`status.reason` of a RampRollout, and `status.version.reason` of an EarlyExitService. One that was promoted has none."),
    ("refusal", "Plans that a worker refuses", "`status.reason` of a RampRollout, and the worker's own `refused`."),
    ("tuning", "States of the tuner", "`status.tuning.state` of an EarlyExitService."),
    ("event", "Events", "`kubectl get events --field-selector involvedObject.kind=EarlyExitService`; `offramp up` prints them."),
)  # fmt: skip


def documented() -> dict[str, str]:
    """What the troubleshooting page says of each reason in its first paragraph; empty links stay there."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    found = {m[1]: _plain(m[2]) for m in re.finditer(r"^### (\w+)\n\n(.+?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)}
    good = text.split("## Nothing is wrong", 1)[1]
    return found | {
        m[1]: _plain(m[2]) for m in re.finditer(r"^\| (\w+) \| (.+) \|$", good, re.MULTILINE) if m[1] != "reason"
    }


def words_of_workers() -> set[str]:
    """What the section about workers documents, Kubernetes' own words among them, of which there is no list."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    section = text.split("## Workers do not start", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^### (\w+)$", section, re.MULTILINE))


def headings() -> set[str]:
    """The reasons that have an entry of their own."""
    return set(re.findall(r"^### (\w+)$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE))


def _plain(text: str) -> str:
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(text.split()))


def page(found: Found) -> str:
    """The whole page."""
    said, entries = documented(), headings()
    parts = [HEAD + "\n".join(f"| [`{name}`](#{name.lower()}) | {text} |" for name, text in TYPES.items()) + "\n"]
    for name in TYPES:
        rows = sorted(
            {(s, r) for one in found.said if name in one.types for s, r in _pairs(one)},
            key=lambda p: (p[0] != "True", p),
        )
        parts.append(f"### {name}\n\n| status | reason | says |\n|---|---|---|")
        parts.append(
            "\n".join(f"| {status} | {_link(reason, entries)} | {said.get(reason, '')} |" for status, reason in rows)
        )
        if name in ("Ready", "WorkersAvailable", "Stalled"):
            parts.append(
                f"| {'True' if name == 'Stalled' else 'False'} | [a worker's reason](#workers-that-do-not-run) | |"
            )
        parts.append("")
    for kind, title, text in SECTIONS:
        words = {*found.words(kind), *(KUBERNETES if kind == "worker" else ())}
        parts.append(f"## {title}\n\n{text}\n\n| word | says |\n|---|---|")
        parts.append("\n".join(f"| {_link(word, entries)} | {said.get(word, '')} |" for word in sorted(words)) + "\n")
    return "\n".join(parts)


def _pairs(said: Said) -> list[tuple[str, str]]:
    return [(status, said.word) for status in said.statuses]


def _link(word: str, entries: set[str]) -> str:
    return (
        f"[`{word}`](../troubleshooting.md#{word.lower()})"
        if word in entries
        else f"[`{word}`](../troubleshooting.md#nothing-is-wrong)"
    )


def outputs() -> dict[str, str]:
    """Pages below ``docs`` and what they should say."""
    return {"reference/conditions.md": page(collect())}
