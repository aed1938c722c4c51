"""What certifies of recorded answers, what no labels could beat, and what so few labels cannot tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.generate.prepared import prompts_of
from bench.generate.recorded import certified, escalation
from bench.report.generation import section
from bench.report.papers import rows
from bench.report.results import Results

from offramp_core.generation.losses import Output

N = 200


@pytest.fixture
def answers() -> dict[str, Any]:
    """int8 is unsure of every tenth answer and differs there; its prompts take as long as those of fp32."""
    wrong = [float(i % 10 == 0) for i in range(N)]
    return {
        "seconds": {"fp32": 1.0, "int8": 0.4},
        "took": {"fp32": [2.0] * N, "int8": [1.4] * N},
        "losses": {output: {"int8": wrong} for output in Output},
        "uncertainty": {"int8": [0.2 + 0.5 * w for w in wrong]},
    }


def test_the_best_escalation_asks_again_where_the_variant_is_wrong_and_counts_both_prompts(
    answers: dict[str, Any],
) -> None:
    found = escalation(answers, Output.TOKEN_F1, 0.05)
    assert found["variant"] == "int8" and found["loss"] == 0.0
    assert found["time"] == pytest.approx(0.4 + 0.1) and found["answer_time"] == pytest.approx((1.4 + 0.1 * 2) / 2)
    assert escalation(answers, Output.TOKEN_F1, 0.1)["answer_time"] == pytest.approx(0.7), "all by the variant"


def test_too_few_labels_are_told_from_a_variant_that_loses_too_much(answers: dict[str, Any], tmp_path: Path) -> None:
    few, many = (certified(answers, Output.EXACT_ANSWER, 0.05, labels=n, draws=3) for n in (60, 1600))
    assert few["untold"] == 3 and few["needed"] > 60 and few["certified"] == 0
    assert many["certified"] >= 2 and many["time"] == pytest.approx(0.5, abs=0.01)
    graded = certified(answers, Output.TOKEN_F1, 0.05, labels=60, draws=3)
    assert graded["needed"] > few["needed"], "right or wrong is told with fewer than a loss in between"
    answers["uncertainty"]["int8"] = [0.3] * N
    lossy = certified(answers, Output.EXACT_ANSWER, 0.05, labels=1600, draws=3)
    assert lossy["certified"] == 0 and lossy["untold"] < 2, "it does not know where it is wrong"
    told = [
        {"output": output, **row, "budget": budget, "escalation": escalation(answers, output, budget)}
        for output in Output
        for budget, row in zip((0.01, 0.05, 0.1), (few, many, lossy), strict=True)
    ]
    run = {"prompts": N, "tokens": 8, "mean_loss": {}, "pattern": "#", "matched": {"int8": 0.9}, "rows": told}
    (tmp_path / "generate.json").write_text(json.dumps({"lossy": {"smollm2/gsm8k-shots": run}}))
    page = "\n".join(section(Results(tmp_path)))
    assert f"cannot be told: {few['needed']} are needed" in page and "| none certifies |" in page
    assert "`#` finds, in so many answers: int8 90 %" in page
    (paper,) = [row for row in rows() if "Generative" in row.what]
    each = "too few labels / 0.50 / none"
    assert paper.ours(Results(tmp_path)) == f"smollm2/gsm8k-shots: {each}, {each}"


def test_questions_behind_answered_ones_are_not_among_them() -> None:
    first = prompts_of("gsm8k-shots", 1)[0]
    *shown, asked = first.split("\n\n")
    assert len(shown) == 3 and all("\n#### " in one for one in shown) and asked.endswith("\nAnswer:")
    assert not any("<<" in one for one in shown), "marks of the data set's calculator are no part of an answer"
    assert asked.removesuffix("\nAnswer:") not in first[: -len(asked)]
