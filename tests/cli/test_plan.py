"""``offramp plan``: figures in a file become a table of what was considered, and what is wrong in it is refused by
name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from offramp_cli.main import app

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "docs"), str(ROOT / "tests" / "worker")]

import bundles  # type: ignore[import-not-found]  # noqa: E402
from blocks import blocks_of  # noqa: E402

PAGE = ROOT / "docs" / "how-to" / "plan.md"
BLOCKS = [block for block in blocks_of(PAGE.read_text(encoding="utf-8"), "plan.md") if block.language != "sh"]


def run(text: str, folder: Path, *options: str) -> Result:
    (folder / "fleet.yaml").write_text(text, encoding="utf-8")
    return CliRunner().invoke(app, ["plan", str(folder / "fleet.yaml"), *options])


def example(number: int = 0) -> Any:
    """A file of the page, to be changed."""
    return yaml.safe_load(BLOCKS[2 * number].text)


def refused(document: Any, folder: Path) -> str:
    done = run(yaml.safe_dump(document), folder)
    assert done.exit_code == 2, done.output
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("error: ")


def test_the_page_shows_what_the_command_answers(tmp_path: Path) -> None:
    done = run(BLOCKS[0].text, tmp_path)
    assert done.exit_code == 0
    assert done.stdout == BLOCKS[1].text


def test_json_has_the_same_plan_for_programs(tmp_path: Path) -> None:
    found = json.loads(run(BLOCKS[0].text, tmp_path, "--json").stdout)
    (service,) = found["services"]
    assert found["costPerHour"] == pytest.approx(sum(pool["costPerHour"] for pool in found["pools"]))
    assert {w["plan"] for w in service["workers"]} == {"int8-exits"}
    assert {row["plan"] for row in service["considered"]} == {"exact", "int8-exits", "bold"}
    assert service["answeredRate"] >= 1.1 * service["demand"] * (1 - 1e-5)


def test_the_times_of_a_bundle_are_read_from_its_profile_and_tiers_are_planned_apart(tmp_path: Path) -> None:
    bundles.write_bundle(tmp_path / "bundle")
    found = json.loads(run(BLOCKS[2].text, tmp_path, "--json").stdout)
    careful, usual = found["services"]
    assert (careful["name"], usual["name"]) == ("digits/careful", "digits/usual")
    assert {w["plan"] for w in careful["workers"]} == {"exact"}
    assert {w["plan"] for w in usual["workers"]} == {"exits"}
    assert careful["demand"] == pytest.approx(200)


def test_where_the_pools_do_not_suffice_the_exit_code_is_1_and_the_table_says_how_much(tmp_path: Path) -> None:
    document = example()
    document["services"][0]["demand"]["rate"] = 100_000
    done = run(yaml.safe_dump(document), tmp_path)
    assert done.exit_code == 1
    assert "stay unanswered" in done.stdout


def test_a_rise_of_three_earlier_days_is_planned_for_and_told(tmp_path: Path) -> None:
    document = example()
    document["services"][0]["demand"] = {"rate": 1000, "earlierDays": [2100, 900, 2000, "1950", 1000]}
    done = run(yaml.safe_dump(document), tmp_path)
    assert "reviews: 1950/s expected, as came at this time on 3 of 5 earlier days, " in done.stdout
    found = json.loads(run(yaml.safe_dump(document), tmp_path, "--json").stdout)
    assert (found["services"][0]["demand"], found["services"][0]["expectedFromDays"]) == (1950.0, 5)
    document["services"][0]["demand"]["earlierDays"] = [2100, 2000, 1000, 1000]
    assert "reviews: 1000/s asked" in run(yaml.safe_dump(document), tmp_path).stdout, "two days are two days"


def test_what_serves_now_stays_where_a_change_would_not_pay(tmp_path: Path) -> None:
    document = example()
    now = [{"plan": "int8-exits", "pool": "core", "batchSize": 1, "count": 4}]
    document["services"][0] |= {"workers": now, "demand": {"rate": 1000}}
    found = json.loads(run(yaml.safe_dump(document), tmp_path, "--json").stdout)
    assert found["services"][0]["workers"] == now
    assert "these workers stay" in found["services"][0]["reason"]


def change(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    at = document
    for part in path[:-1]:
        at = at[part]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return document


CORE = ("services", 0, "plans", 0, "pools", "core")


@pytest.mark.parametrize(
    ("path", "value", "field", "says"),
    [
        (("pools", 0, "costPerHour"), "cheap", "pools[0].costPerHour", "must be a number"),
        (("pools", 0, "costPerHour"), float("nan"), "pools[0].costPerHour", "must be a number"),
        (("pools", 0, "costPerHour"), -1, "pools[0].costPerHour", "must be a number"),
        (("pools", 0, "costPerHour"), True, "pools[0].costPerHour", "must be a number"),
        (("pools", 0, "maxWorkers"), 0, "pools[0].maxWorkers", "leave out a pool without workers"),
        (("pools", 0, "maxWorkers"), 1.5, "pools[0].maxWorkers", "whole number"),
        (("pools", 0, "name"), "quad", "pools", "quad stands twice"),
        (("pools", 0, "name"), "other", "services[0].plans[0].pools", "names 'core', which is not among the pools"),
        (("pools", 0, "nodes"), 3, "pools[0].nodes", "is unknown; here may stand name, costPerHour"),
        (("pools",), [], "pools", "must be a list of 1 to"),
        (("services", 0, "name"), "a/b", "services[0].name", "without '/'"),
        (("services", 0, "demand"), None, "services[0].demand", "must be an object with rate"),
        (("services", 0, "demand", "rate"), "many", "services[0].demand.rate", "must be a number >= 0"),
        (("services", 0, "demand", "earlierDays"), 5, "services[0].demand.earlierDays", "a list of 1 to 7 rates"),
        (("services", 0, "demand", "earlierDays"), [1] * 8, "services[0].demand.earlierDays", "a list of 1 to 7 rates"),
        (("services", 0, "demand", "earlierDays"), [1, "x"], "services[0].demand.earlierDays[1]", "must be a number"),
        (("services", 0, "objective", "latency", "threshold"), 88, "…objective.latency.threshold", "not a duration"),
        (("services", 0, "objective", "latency", "percentile"), 100, "…objective.latency.percentile", "< 100"),
        (("services", 0, "plans", 1, "name"), "exact", "services[0].plans", "exact stands twice"),
        (("services", 0, "plans", 0, "disagreement"), 2, "services[0].plans[0].disagreement", "<= 1"),
        ((*CORE, "batches"), {0: "1ms"}, "services[0].plans[0].pools.core.batches.0", "is no batch size"),
        ((*CORE, "batches"), {1: "0ms"}, "services[0].plans[0].pools.core.batches.1", "above 0"),
        ((*CORE, "batches"), {}, "services[0].plans[0].pools.core.batches", "has 0 sizes"),
        ((*CORE, "batches"), None, "services[0].plans[0].pools.core", "needs either batches"),
        ((*CORE, "profile"), "bundle", "services[0].plans[0].pools.core", "needs either batches"),
        ((*CORE, "saving"), "nan", "services[0].plans[0].pools.core.saving", "belongs to profile"),
        ((*CORE, "batches"), {"1": "8ms", "01": "80ms"}, "services[0].plans[0].pools.core.batches", "1 stands twice"),
        ((*CORE, "batches"), {"1" * 5000: "8ms"}, f"services[0].plans[0].pools.core.batches.{'1' * 20}", "no batch"),
        ((*CORE, "batches"), {"１": "8ms"}, "services[0].plans[0].pools.core.batches.１", "is no batch size"),
        ((*CORE, "batches"), {1: f"0.{'0' * 300}9s"}, "services[0].plans[0].pools.core.batches", "a batch of 1 in"),
        (("services", 0, "plans", 0, "pools"), {}, "services[0].plans[0].pools", "names no pool"),
        (("services", 0, "objective", "latency", "percentile"), 1e-7, "…objective.latency.percentile", "raise it"),
    ],
)
def test_what_is_wrong_is_refused_with_the_field_and_the_next_step(
    path: tuple[Any, ...], value: Any, field: str, says: str, tmp_path: Path
) -> None:
    error = refused(change(example(), path, value), tmp_path)
    assert error.startswith(field.replace("…", "services[0].") + ":")
    assert says in error


@pytest.mark.parametrize(
    ("tiers", "says"),
    [
        ([{"name": "a", "share": 0.5}, {"name": "b", "share": 0.4, "maxDisagreement": 0}], "shares come to 0.9"),
        ([{"name": "a", "share": 0.5}, {"name": "b", "share": 0.5}], "b promises what a promises"),
        ([{"name": "a", "share": 0.5}, {"name": "a", "share": 0.5, "latency": "20ms"}], "a stands twice"),
        ([{"name": "a", "share": 1, "latency": "1s"}], "may only be stricter"),
        ([{"name": "a", "share": 1, "maxDisagreement": 0.2}], "may only be stricter"),
    ],
)
def test_tiers_that_contradict_each_other_or_their_service_are_refused(tiers: Any, says: str, tmp_path: Path) -> None:
    document = example()
    document["services"][0]["tiers"] = tiers
    error = refused(document, tmp_path)
    assert error.startswith("services[0].tiers")
    assert says in error


CHAIN = {"segment_seconds": [0.001, 0.002], "ramp_seconds": [0.0001]}


def profile_of(*batches: dict[str, Any]) -> str:
    """A profile whose batches differ from right ones in what is given."""
    right = {"batch_size": 1, "exact_seconds": 0.003, "regroup_seconds": 0, **CHAIN}
    return json.dumps({"executor": "ort-cpu", "threads": 1, "batches": [right | batch for batch in batches]})


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        (None, "cannot be read"),
        ("{", "name what `offramp prepare` wrote"),
        ('{"batches": [{"batch_size": 1}]}', "missing required field"),
        (profile_of(), "batch sizes are []"),
        (profile_of({"batch_size": 2}, {"batch_size": 1}), "batch sizes are [2, 1]"),
        (profile_of({"batch_size": 1}, {"batch_size": 1}), "batch sizes are [1, 1]"),
        (profile_of({"batch_size": 0}), "the first at least 1"),
        (profile_of({"batch_size": 10**400}), "batches larger than"),
        (profile_of({"exact_seconds": 10**400}), "out of range"),
        (profile_of({"exact_seconds": 0}), "not finite and >= 0"),
        (profile_of({"exact_seconds": -1}), "not finite and >= 0"),
        (profile_of({"precisions": {"int8": CHAIN | {"segment_seconds": [-1, 2]}}}), "not finite and >= 0"),
        (profile_of({"exact_seconds": 1}).replace('"exact_seconds": 1', '"exact_seconds": 1e999'), "out of range"),
        (profile_of({"exact_seconds": 5e-324}), "a batch of 1 in"),
        (profile_of({"precisions": {"int8": CHAIN}}), "no precision 'int4'"),
    ],
)
def test_a_profile_that_says_nothing_is_refused(profile: str | None, says: str, tmp_path: Path) -> None:
    if profile is not None:
        (tmp_path / "profile.json").write_text(profile)
    document = example()
    precision = {"precision": "int4"} if "precision" in says else {}
    document["services"][0]["plans"][0]["pools"]["core"] = {"profile": "profile.json", **precision}
    error = refused(document, tmp_path)
    assert error.startswith("services[0].plans[0].pools.core.profile:")
    assert says in error


@pytest.mark.parametrize(
    "workers",
    [
        [{"plan": "exact", "pool": "core", "batchSize": 0, "count": 1}],
        [{"plan": "exact", "pool": "core", "batchSize": 1, "count": 0}],
        [{"plan": "exact", "pool": "core", "batchSize": 1, "count": 1}] * 2,
    ],
)
def test_workers_that_cannot_serve_now_are_refused(workers: Any, tmp_path: Path) -> None:
    document = example()
    document["services"][0]["workers"] = workers
    assert refused(document, tmp_path).startswith("services[0].workers[")


def test_more_batch_sizes_than_can_be_planned_in_seconds_are_refused(tmp_path: Path) -> None:
    document = example()
    batches = {size: f"{size + 7}ms" for size in range(1, 17)}
    pools = {name: {"batches": batches} for name in ("core", "quad")}
    plans = [{"name": f"p{i}", "disagreement": 0, "pools": pools} for i in range(5)]
    document["services"][0]["plans"] = plans
    assert "160 batch sizes on all pools" in refused(document, tmp_path)


def test_one_more_saves_what_the_plan_with_one_more_costs_less(tmp_path: Path) -> None:
    before = json.loads(run(BLOCKS[0].text, tmp_path, "--json").stdout)
    document = example()
    document["pools"][0]["maxWorkers"] += 1
    after = json.loads(run(yaml.safe_dump(document), tmp_path, "--json").stdout)
    assert before["pools"][0]["oneMoreSavesPerHour"] == pytest.approx(before["costPerHour"] - after["costPerHour"])
    assert before["pools"][0]["oneMoreSavesPerHour"] > 0


@pytest.mark.parametrize("where", ["costPerHour: 0.04", "maxWorkers: 4", "rate: 1400"])
def test_a_number_that_nobody_can_print_is_refused(where: str, tmp_path: Path) -> None:
    done = run(BLOCKS[0].text.replace(where, f"{where.partition(':')[0]}: 0x{'f' * 5000}"), tmp_path)
    assert done.exit_code == 2
    assert "more than 400 digits" in done.stderr


def test_what_is_no_file_is_refused_at_once() -> None:
    done = CliRunner().invoke(app, ["plan", "/dev/zero"])
    assert done.exit_code == 2 and "is no file" in done.stderr


@pytest.mark.parametrize("text", ["[1, 2", "- a", "a: 1\n---\nb: 2\n", "\x00"])
def test_a_file_that_is_no_document_is_refused(text: str, tmp_path: Path) -> None:
    done = run(text, tmp_path)
    assert done.exit_code == 2
    assert "Traceback" not in done.output and done.stderr.startswith("error: ")


def test_a_file_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "nothing.yaml")])
    assert done.exit_code == 2 and "nothing.yaml: cannot be read" in done.stderr


def test_help_has_an_example() -> None:
    done = CliRunner().invoke(app, ["plan", "--help"])
    assert "offramp plan fleet.yaml --json" in done.stdout
