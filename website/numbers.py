"""Tables put between markers of written pages, so that no figure is typed by hand.

How many labels and audits things take is computed by the product's own code; what was measured is taken from
``docs/benchmarks.md``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from offramp_core.certify.certificate import allowance
from offramp_core.certify.planner import fewest_labels, labels_for
from offramp_core.control.rollouts.gates import HARMFUL_FACTOR, POWER, harmful_rates
from offramp_core.control.tuning.tuner import first_attempt_labels
from offramp_core.evidence.exposure import audits_needed
from offramp_lab.stopping import stopping_time
from website.build import DOCS

BUDGETS = (0.005, 0.01, 0.02, 0.05)
CONFIDENCE = 0.95
LONGEST_LOOK = 6_000


def labels() -> str:
    """Labels until a first certificate, by budget."""
    level = allowance(1 - CONFIDENCE, 1)
    rows = [
        [
            f"{budget:.1%}",
            f"{first_attempt_labels(budget):,}",
            f"{fewest_labels(budget, level):,}",
            *(f"{labels_for(share * budget, budget=budget, level=level):,}" for share in (0.2, 0.5)),
        ]
        for budget in BUDGETS
    ]
    head = [
        "`maxDisagreement`",
        "first attempt at",
        "a flawless plan needs",
        "a plan at a fifth of the budget",
        "a plan at half of it",
    ]
    return _table(head, rows)


def audits() -> str:
    """Audits of a canary step, by budget."""
    rows = []
    for budget in BUDGETS:
        grid, alpha = harmful_rates(budget), 1 - CONFIDENCE
        needed = audits_needed(budget=budget, harmful=HARMFUL_FACTOR * budget, alpha=alpha, power=POWER, grid=grid)
        stop = [
            stopping_time(f * budget, p0=budget, alpha=alpha, looks=LONGEST_LOOK, grid=grid).quantile(0.9)
            for f in (3, 5)
        ]
        rows.append([f"{budget:.1%}", f"{needed:,}", *(f"{n:,}" if n else f"> {LONGEST_LOOK:,}" for n in stop)])
    return _table(
        [
            "`maxDisagreement`",
            "audits until a step may pass",
            "until three budgets are stopped",
            "until five budgets are stopped",
        ],
        rows,
    )


SETS = {
    "resnet56-mx4": "ResNet-56 on CIFAR-10, 4x4 heads",
    "sst2-mean": "MiniLM-L6 on SST-2, mean-pooled heads",
    "imdb-mean": "MiniLM-L6 on IMDB, mean-pooled heads",
}


def savings() -> str:
    """What certified plans saved on recorded scores: median and the middle 90 % of draws."""
    rows = []
    for name, title in SETS.items():
        section = _benchmarks().split(f"({name})\n", 1)[1]
        found = re.search(r"^\| certified \| ([^|]+) \| ([^|]+) \| (\d+ of \d+) \|", section, re.MULTILINE)
        assert found is not None, f"docs/benchmarks.md has no row of `certified` for {name}"
        rows.append([title, *(part.strip() for part in found.groups())])
    return _table(["model", "model time saved", "answers that differ", "draws over budget"], rows)


def promises() -> str:
    """What was measured of each promise."""
    rows = re.findall(r"^\| promise \(\w\): ([^|]+) \| ([^|]+) \| ([^|]+) \|", _benchmarks(), re.MULTILINE)
    assert len(rows) == 3, "docs/benchmarks.md has no three rows of promises among its targets"
    return _table(["promise", "measured", ""], [[part.strip() for part in row] for row in rows])


def _benchmarks() -> str:
    return (DOCS / "benchmarks.md").read_text(encoding="utf-8")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {"labels": labels, "audits": audits, "savings": savings, "promises": promises}
MARKED = re.compile(r"(<!-- numbers: (\w+) -->\n).*?(<!-- /numbers -->)", re.DOTALL)


def outputs() -> dict[str, str]:
    """Written pages with fresh tables between their markers."""
    found, made = {}, dict[str, str]()
    pages = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
    for name, path in {"../README.md": DOCS.parent / "README.md", **pages}.items():
        text = path.read_text(encoding="utf-8")
        if "<!-- numbers: " not in text:
            continue
        for _, table, _ in MARKED.findall(text):
            made.setdefault(table, TABLES[table]())
        found[name] = MARKED.sub(lambda m: f"{m[1]}\n{made[m[2]]}\n\n{m[3]}", text)
    return found
