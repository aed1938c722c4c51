"""What each variant's whole answers lose, how unsure they are, and what certifies at which budget.

The recorded answers are the population: calibration samples are drawn from them with replacement, a plan is found and
certified on each with the product's own tuner, and its true loss is that over all recorded answers. What a plan takes
is told in time per token, as the tuner reckons, and in time of whole answers, their prompts included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.generate.writing import encoded, loaded, text_of, write
from offramp_core.generation.columns import VariantStep, answer_uncertainty, steps_of, variant_columns, variant_costs
from offramp_core.generation.losses import AnswerLosses, Output, answer_pattern
from offramp_core.plan import Plan
from offramp_core.precision import EXACT
from offramp_core.protocol import RampInfo
from offramp_core.records import Records, records_from_arrays
from offramp_core.tuning import NeedsLabels, Proposed, TuningRequest, tune
from offramp_worker.generate.plan_target import variant_seconds
from offramp_worker.generate.seam import DecodingRoute, Sampling

BUDGETS = (0.01, 0.02, 0.05, 0.10)
CONFIDENCE = 0.95
MAX_OVERHEAD = 0.5
END = "\0"  # no model writes it


class Truth(NamedTuple):
    """Of a plan over all recorded answers: mean loss, and time per token and of answers in times of the reference's."""

    loss: float
    time: float
    answer_time: float


def recorded_answers(
    folder: Path, prompts: Sequence[str], *, tokens: int, tick: Callable[[], None], pattern: str = "", stop: str = ""
) -> dict[str, Any]:
    """Every variant's greedy answers, up to ``stop``: losses by output, uncertainties, the bundle's times per token,
    the processor's seconds of each answer, its prompt included, and the share in which the pattern matches."""
    bundle = loaded(folder)
    seconds = variant_seconds(bundle.bundle)
    part = answer_pattern(pattern) if pattern else None
    compare = AnswerLosses(part)
    matched = dict.fromkeys(seconds, 0)
    lossy = [name for name in seconds if name != EXACT]
    losses: dict[str, dict[str, list[float]]] = {o: {name: [] for name in lossy} for o in Output}
    unsure: dict[str, list[float]] = {name: [] for name in lossy}
    took: dict[str, list[float]] = {name: [] for name in seconds}
    for prompt in prompts:
        ids = encoded(bundle, prompt)
        texts: dict[str, str] = {}
        for name in seconds:
            began = time.process_time()
            route, sampling = DecodingRoute(name), Sampling(logprobs=True)
            (answer,), _ = write(bundle, [ids], route, tokens=tokens, sampling=sampling, stop=stop)
            took[name].append(time.process_time() - began)
            texts[name] = text_of(bundle, answer.tokens).partition(stop or END)[0]
            matched[name] += part is not None and part.search(texts[name]) is not None
            if name != EXACT:
                unsure[name].append(answer_uncertainty([t.logprob for t in answer.tokens]))
        for name in lossy:
            for output, loss in compare(texts[name], texts[EXACT]).items():
                losses[output][name].append(loss)
        tick()
    bundle.engine.close()
    return {
        "tokens": tokens,
        "seconds": seconds,
        "took": took,
        "matched": {name: n / len(prompts) for name, n in matched.items()} if part else {},
        "losses": losses,
        "uncertainty": unsure,
    }


def population(found: Mapping[str, Any], output: str) -> tuple[Records, tuple[RampInfo, ...]]:
    """Recorded answers as records of one output, and their columns."""
    columns = variant_columns(found["seconds"])
    variants = [c.precision or c.id for c in columns]
    kind = np.int8 if output == Output.EXACT_ANSWER else np.float32  # right or wrong is tested by the binomial
    arrays: dict[str, Any] = {
        "uncertainty": np.array([found["uncertainty"][v] for v in variants], dtype=np.float32).T,
        "loss": np.array([found["losses"][output][v] for v in variants], dtype=kind).T,
        "ramp_id": np.array([c.id for c in columns]),
        "ramp_precision": np.array([c.precision for c in columns]),
    }
    arrays["final_loss"] = np.zeros(len(arrays["loss"]), dtype=kind)
    arrays |= {name: np.array(values) for name, values in variant_costs(found["seconds"]).items()}
    return records_from_arrays(arrays), columns


def certified(
    found: Mapping[str, Any], output: str, budget: float, *, labels: int, draws: int, seed: int = 1
) -> dict[str, Any]:
    """Over ``draws`` samples of ``labels`` answers: how many certify a plan, how many of those break the budget, and
    the median times. ``untold`` samples have too few answers for a test; ``needed`` is what the tuner asks for."""
    pool, columns = population(found, output)
    request = TuningRequest(
        max_disagreement=budget,
        delta=1 - CONFIDENCE,
        test_index=1,
        backbone_digest="b",
        ramp_set_digest="r",
        ramp_ids=tuple(c.id for c in columns if not c.precision),
        max_overhead=MAX_OVERHEAD,
        precisions=None,
    )
    rng, truths, broken, plans, needed = np.random.default_rng(seed), list[Truth](), 0, list[str](), list[int]()
    for _ in range(draws):
        drawn = replace_times(pool.take(rng.integers(0, len(pool), labels)), labels)
        outcome = tune(drawn, request)
        if isinstance(outcome, NeedsLabels) and not outcome.tests_run:
            needed.append(outcome.needed)
        if not isinstance(outcome, Proposed):
            truths.append(Truth(0.0, 1.0, 1.0))
            continue
        truths.append(truth(found, output, steps_of(outcome.plan, columns)))
        broken += truths[-1].loss > budget
        plans.append(named(outcome.plan))
    proven = len(plans)
    usual = max(set(plans), key=plans.count) if plans else ""
    return {
        "budget": budget,
        "labels": labels,
        "draws": draws,
        "certified": proven,
        "broken": broken,
        "time": float(np.median([t.time for t in truths])),
        "answer_time": float(np.median([t.answer_time for t in truths])),
        "usual_plan": usual,
        "untold": len(needed),
        "needed": int(np.median(needed)) if needed else 0,
    }


def escalation(found: Mapping[str, Any], output: str, budget: float) -> dict[str, Any]:
    """A variant first, and the reference again where that is unsure: the one with the shortest answers of all whose
    loss over the recorded answers is within the budget. No sample could certify more."""
    best = {"variant": "", "loss": 0.0, "time": 1.0, "answer_time": 1.0}
    for variant, unsure in found["uncertainty"].items():
        for below in sorted({*np.float32(unsure).tolist(), 2.0}):
            one = truth(found, output, (VariantStep(variant, leave_below=below), VariantStep(EXACT)))
            if one.loss <= budget and one.answer_time < best["answer_time"]:
                best = {"variant": variant, **one._asdict()}
    return best


def truth(found: Mapping[str, Any], output: str, steps: Sequence[VariantStep]) -> Truth:
    """What a plan's steps come to over all recorded answers."""
    seconds, took = found["seconds"], {name: np.array(each) for name, each in found["took"].items()}
    n = len(took[EXACT])
    loss, spent, whole, open_ = np.zeros(n), np.zeros(n), np.zeros(n), np.ones(n, dtype=bool)
    for step in steps:
        spent[open_] += seconds[step.variant]
        whole[open_] += took[step.variant][open_]
        unsure = np.zeros(n) if step.variant == EXACT else np.float32(found["uncertainty"][step.variant])
        leaves = open_ & (unsure < step.leave_below)
        if step.variant != EXACT:
            loss[leaves] = np.array(found["losses"][output][step.variant])[leaves]
        open_ &= ~leaves
    return Truth(float(loss.mean()), float(spent.mean() / seconds[EXACT]), float(whole.sum() / took[EXACT].sum()))


def named(plan: Plan) -> str:
    """A plan in a few words."""
    first = "+".join(ramp.id for ramp in plan.ramps if ramp.threshold > 0)
    return f"{first}, then {plan.precision}" if first else plan.precision


def replace_times(records: Records, n: int) -> Records:
    """The same records, admitted one second after the other."""
    return replace(
        records, time=np.arange(n, dtype=np.float64), others={p: replace_times(r, n) for p, r in records.others.items()}
    )
