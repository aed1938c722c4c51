"""The seed papers' own figures, and ours beside them.

Figures of the papers are quoted from research/early-exit (sections 1.7 and 5): arXiv:2312.05385 (Apparate, SOSP 2024),
its slides and its public artifact (github.com/dywsjtu/apparate). Other models, data and machines than ours: what can be
compared is said in each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report.results import MISSING, Results, percent, policy_row

VISION = ("resnet56-mx4", "resnet56-gap", "resnet20-mx4", "resnet20-gap")
TEXTS = ("sst2-mean", "imdb-mean", "amazon-mean")
TEXTS_CLS = ("sst2-cls", "imdb-cls", "amazon-cls")
VIDEOS = ("video-grid", "video-gap")


@dataclass(frozen=True, slots=True)
class PaperRow:
    """``ours`` makes the cell from the results."""

    what: str
    theirs: str
    ours: Callable[[Results], str]
    comparable: str


def rows() -> Sequence[PaperRow]:
    """In the order of the paper's evaluation."""
    return (
        PaperRow(
            "Wins against vanilla, vision: median latency",
            "0.09 to 0.60 of vanilla (6 models x 8 videos)",
            lambda r: _served(r, VIDEOS, "certified", "p50_ratio"),
            "one video of ours, simulated queue at 0.3 load; theirs counts the vanilla queue, ours its own",
        ),
        PaperRow(
            "Wins against vanilla, ResNet-50 at 99.0 to 99.2 %: median; p95",
            "0.11 to 0.53; p95 1.00 to 1.02",
            lambda r: (
                _served(r, VISION, "certified", "p50_ratio") + "; p95 " + _served(r, VISION, "certified", "p95_ratio")
            ),
            "CIFAR-10 images have no temporal locality, their frames do",
        ),
        PaperRow(
            "Wins against vanilla, text: median latency",
            "0.76 to 0.90 of vanilla (4 models x 2 sets)",
            lambda r: _served(r, TEXTS, "certified", "p50_ratio"),
            "MiniLM-L6 on SST-2, IMDB and Amazon against BERT-class models on IMDB and Amazon",
        ),
        PaperRow(
            "Optimal (each input at its earliest agreeing ramp)",
            "not read in figures",
            lambda r: _saving(r, (*VISION, *TEXTS, *VIDEOS), "oracle"),
            "the same definition; an upper bound that no thresholds reach",
        ),
        PaperRow(
            "BranchyNet / + / -opt, vision: agreement; saving",
            "85.8 to 99.8 / 76.1 to 99.9 / 99.0 to 99.7 %; -11.0 to 88.3 / 88.3 / 74.5 %",
            lambda r: _families(r, VISION, ("branchynet", "branchynet+", "branchynet-opt")),
            "ours tunes once on 4,500 rows to a 1 % budget and leaves out plans that save nothing",
        ),
        PaperRow(
            "DeeBERT / + / -opt, text: agreement; saving",
            "91.7 to 97.1 / 82.2 to 90.3 / 99.0 %; 13.2 to 36.1 / 31.7 to 36.1 / 9.8 to 36.1 %",
            lambda r: _families(r, TEXTS_CLS, ("deebert", "deebert+", "deebert-opt")),
            "CLS heads of MiniLM; theirs are full BERT poolers",
        ),
        PaperRow(
            "Ramp budgets 2 / 5 / 10 %: saving",
            "ResNet-50 48.9 / 49.6 / 50.4 %; GPT2-medium 18.5 / 22.2 / 24.9 %",
            _ramp_budgets,
            "exact search under the same three bounds; ours is a share of time, worst case",
        ),
        PaperRow(
            "Accuracy targets: saving",
            "one target, 99 %",
            _accuracy_targets,
            "exact / certified at budgets 0.5, 1, 2, 5 %",
        ),
        PaperRow(
            "On Clockwork: latency against vanilla",
            "ResNet-50 0.534; GPT2 0.884",
            lambda r: _served(r, (*VISION, *TEXTS), "certified", "p50_ratio", batching="clockwork"),
            "simulated Clockwork, Azure Functions arrivals, ramps and regrouping inside the queue",
        ),
        PaperRow(
            "On TF-Serving: latency against vanilla",
            "ResNet-50 0.648; GPT2 0.894",
            lambda r: _served(r, (*VISION, *TEXTS), "certified", "p50_ratio", batching="tf-serving"),
            "as above, with its batch timeout",
        ),
        PaperRow(
            "Does the tuner keep 1 %?",
            "7 of 9 published runs of the artifact (DistilBERT on IMDB) end above 1 %",
            lambda r: _broken(r, ("apparate", "apparate-artifact", "apparate-artifact-nlp", "certified")),
            "draws whose stream was served with more than 1 % true disagreement",
        ),
        PaperRow(
            "Saving lost by greedy tuning",
            "0 to 3.8 % of the optimum, as claimed (against grid search, same ramps)",
            _greedy_loss,
            "greedy on evenly spaced ramps against exact placement at equal true disagreement",
        ),
        PaperRow(
            "Generative models (T5, Llama): time per token",
            "0.22 to 0.77 of vanilla",
            _generated,
            "SmolLM2-135M and stories260K; a variant of fewer bits or escalation, certified on whole answers by token "
            "F1, then ROUGE-L, at 1 / 5 / 10 % loss; drafts, which lose nothing, are in their own table",
        ),
    )


def _generated(results: Results) -> str:
    """Median time per token of what certifies by token F1 and by ROUGE-L, by model and prompts."""
    cells = []
    for name, run in ((results.get("generate") or {}).get("lossy") or {}).items():
        rows = {(row["output"], row["budget"]): row for row in run["rows"]}
        by_output = [" / ".join(_sold(rows[of, b]) for b in (0.01, 0.05, 0.1)) for of in ("TokenF1", "RougeL")]
        cells.append(f"{name}: {', '.join(by_output)}")
    return "; ".join(cells) or MISSING


def _sold(row: dict[str, Any]) -> str:
    if 2 * row["certified"] > row["draws"]:
        return f"{row['time']:.2f}"
    return "too few labels" if 2 * row["untold"] > row["draws"] else "none"


def _served(results: Results, names: Sequence[str], policy: str, key: str, *, batching: str = "offramp") -> str:
    """Latency against exits off at the lowest load under Azure Functions arrivals, by record set."""
    cells = []
    for name in names:
        result = results.get(f"serving-{name}")
        if result is None:
            continue
        row = policy_row(result["loads"][0], policy)
        serving = _find(row["serving"] if row else [], batching)
        if serving is not None and serving[key] is not None:
            cells.append(f"{name} {serving[key]:.2f}")
    return ", ".join(cells) or MISSING


def _find(servings: Sequence[dict[str, Any]], batching: str) -> dict[str, Any] | None:
    wanted = [s for s in servings if s["batching"] == batching]
    for arrivals in ("azure-functions", "poisson"):
        for serving in wanted:
            if serving["arrivals"] == arrivals:
                return serving
    return None


def _saving(results: Results, names: Sequence[str], policy: str) -> str:
    cells = []
    for name in names:
        result = results.get(f"draws-{name}")
        row = policy_row(result, policy) if result else None
        if row is not None:
            cells.append(f"{name} {percent(row['saving']['median'])}")
    return ", ".join(cells) or MISSING


def _families(results: Results, names: Sequence[str], policies: Sequence[str]) -> str:
    cells = []
    for name in names:
        result = results.get(f"draws-{name}")
        if result is None:
            continue
        found = [row for row in (policy_row(result, policy) for policy in policies) if row is not None]
        agreement = " / ".join(percent(1 - row["disagreement"]["median"]) for row in found)
        saving = " / ".join(percent(row["saving"]["median"]) for row in found)
        cells.append(f"{name}: {agreement}; {saving}")
    return "<br>".join(cells) or MISSING


def _ramp_budgets(results: Results) -> str:
    cells = []
    for name, result in results.of_stage("targets"):
        shares = " / ".join(percent(row["exact"]["saving"]["median"]) for row in result["ramp_budgets"])
        cells.append(f"{name} {shares}")
    return "<br>".join(cells) or MISSING


def _accuracy_targets(results: Results) -> str:
    cells = []
    for name, result in results.of_stage("targets"):
        pairs = " · ".join(
            f"{percent(row['exact']['saving']['median'], 0)} / {percent(row['certified']['saving']['median'], 0)}"
            for row in result["budgets"]
        )
        cells.append(f"{name} {pairs}")
    return "<br>".join(cells) or MISSING


def _broken(results: Results, policies: Sequence[str]) -> str:
    cells = []
    for policy in policies:
        found = [row for _, result in results.of_stage("draws") if (row := policy_row(result, policy)) is not None]
        if found:
            cells.append(f"{policy} {sum(r['over_budget'] for r in found)} of {sum(r['n'] for r in found)}")
    return ", ".join(cells) or MISSING


def _greedy_loss(results: Results) -> str:
    cells = []
    for name, result in results.of_stage("frontier"):
        exact, greedy = (result["prices"]["time"][policy]["saving"] for policy in ("exact", "greedy"))
        cells.append(f"{name} {percent((exact - greedy) / exact)}")
    return ", ".join(cells) or MISSING
