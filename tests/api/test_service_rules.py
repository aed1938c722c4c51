"""Every rule of EarlyExitService, on a real API server: one manifest it takes, one it refuses, and the sentence it
says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from offramp_cli.daytwo.lint import lint_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server


class Rule(NamedTuple):
    """A value at ``path`` that is taken, one that is refused, and part of the sentence; ``...`` stands for absence."""

    path: str
    good: Any
    bad: Any
    sentence: str


SAMPLES = sorted((Path(__file__).resolve().parents[2] / "manifests" / "samples").glob("*.yaml"))
ABSENT = ...
# What the API server says of a schema; `offramp lint` has its own words for that, and the rules' own sentences for the
# rest.
SCHEMA_WORDS = (
    "Required value",
    "unknown field",
    "Unsupported value",
    "should ",
    "must be of type",
    "Too long",
    "must have at most",
    "Duplicate value",
)
DIGEST = "sha256:" + "0123456789abcdef" * 4
OLD_ROUTE = "spec.updatePolicy.sideBySide.gateway"
ROUTE = {"parentRefs": [{"name": "public"}]}
PIN = {"ramps": [{"id": "r04-grid", "threshold": "0.25"}]}
INT8_PIN = {**PIN, "precision": "int8"}
OVERLOADED = {
    "latency": {"threshold": "40ms"},
    "accuracy": {"maxDisagreement": "0.02"},
    "overload": {"maxDisagreement": "0.05"},
}
MANY_TIERS = [{"name": f"t{i}", "maxDisagreement": "0.001"} for i in range(8)]
GENERATED = {"latency": {"threshold": "5s"}, "accuracy": {"maxLoss": "0.05", "output": "RougeL"}}
SEVEN_RAMPS = [{"id": f"r0{i}-grid", "threshold": "0.1"} for i in range(7)]

RULES: list[Rule] = [
    Rule("metadata.name", "a" * 40, "a" * 41, "metadata.name must have at most 40 characters"),
    Rule("metadata.name", "resnet-56", "56-resnet", "metadata.name must start with a letter"),
    Rule("spec.model", {"uri": "file:///bundles/digits"}, ABSENT, "spec.model: Required value"),
    Rule("spec.model.uri", "oci://offramp/digits@" + DIGEST, ABSENT, "spec.model.uri: Required value"),
    Rule(
        "spec.model.uri",
        "oci://offramp/digits:1",
        "gs://bucket/digits",
        "uri must be oci://IMAGE, pvc://CLAIM/PATH, https://HOST/PATH",
    ),
    Rule("spec.model.uri", "file:///b", "oci://", "uri must be oci://IMAGE, pvc://CLAIM/PATH, https://HOST/PATH"),
    Rule(
        "spec.model.uri",
        "https://models.example/digits.tar?v=2",
        "http://models.example/digits.tar",
        "uri must be oci://IMAGE, pvc://CLAIM/PATH",
    ),
    Rule(
        "spec.model.uri",
        "https://models.example:8443/digits.tar",
        "https://me:pw@models.example/digits.tar",
        "without user, password and fragment",
    ),
    Rule("spec.model.uri", "https://models.example/d", "https://models.example", "uri must be https://HOST/PATH"),
    Rule(
        "spec.model.uri",
        "pvc://models",
        "pvc://Models/digits",
        "uri of a claim must be pvc://CLAIM or pvc://CLAIM/PATH",
    ),
    Rule("spec.model.uri", "pvc://models/digits/v1..2", "pvc://models/../secrets", "no '..'"),
    Rule("spec.model.uri", "s3://models/digits/v1.tar", "s3://models/", "uri of an object must be s3://BUCKET/KEY"),
    Rule(
        "spec.model",
        {"uri": "s3://models/d.tar", "secretRef": {"name": "models"}},
        {"uri": "oci://models/d:1", "secretRef": {"name": "models"}},
        "secretRef is for https:// and s3://",
    ),
    Rule(
        "spec.model",
        {"uri": "https://a.example/d.tar", "secretRef": {"name": "models"}},
        {"uri": "https://a.example/d.tar", "secretRef": {}},
        "spec.model.secretRef.name: Required value",
    ),
    Rule(
        "spec.model",
        {"uri": "https://a.example/d.tar", "secretRef": {"name": "my.models"}},
        {"uri": "https://a.example/d.tar", "secretRef": {"name": "../x"}},
        "name must be the name of a Secret",
    ),
    Rule(
        "spec.model",
        {"uri": "https://a.example/d.tar", "archiveDigest": DIGEST},
        {"uri": "pvc://models/d", "archiveDigest": DIGEST},
        "archiveDigest is for https:// and s3://",
    ),
    Rule(
        "spec.model",
        {"uri": "s3://models/d.tar", "archiveDigest": DIGEST},
        {"uri": "s3://models/d.tar", "archiveDigest": "sha256:x"},
        "archiveDigest must be sha256: followed by",
    ),
    Rule(
        "spec.model",
        {"uri": "s3://models/d.tar", "region": "eu-west-1"},
        {"uri": "https://a.example/d.tar", "region": "eu-west-1"},
        "endpoint and region are for s3://",
    ),
    Rule(
        "spec.model",
        {"uri": "s3://models/d.tar", "region": "us-gov-west-1"},
        {"uri": "s3://models/d.tar", "region": "EU"},
        "region must have lower-case letters",
    ),
    Rule(
        "spec.model",
        {"uri": "s3://models/d.tar", "endpoint": "https://minio.example:9000"},
        {"uri": "s3://models/d.tar", "endpoint": "minio.example"},
        "endpoint must be https://HOST",
    ),
    Rule(
        "spec.model",
        {"uri": "s3://models/d.tar", "endpoint": "http://minio:9000", "archiveDigest": DIGEST},
        {"uri": "s3://models/d.tar", "endpoint": "http://minio:9000"},
        "an endpoint without TLS needs archiveDigest",
    ),
    Rule("spec.model.uri", "file:///b", "oci://two words", "without spaces"),
    Rule("spec.model.uri", "oci://" + "a" * 1018, "oci://" + "a" * 1019, "Too long: may not be more than 1024"),
    Rule(
        "spec.model.digest",
        DIGEST,
        "sha256:short",
        "digest must be sha256: followed by 64 lower-case hexadecimal digits",
    ),
    Rule(
        "spec.model.digest",
        DIGEST,
        DIGEST.upper(),
        "digest must be sha256: followed by 64 lower-case hexadecimal digits",
    ),
    Rule("spec.model.checksum", ABSENT, "x", 'unknown field "spec.model.checksum"'),
    Rule(
        "spec.objective",
        {"latency": {"threshold": "1s"}, "accuracy": {"maxDisagreement": "0.01"}},
        ABSENT,
        "spec.objective: Required value",
    ),
    Rule("spec.objective.latency", {"threshold": "1s"}, ABSENT, "spec.objective.latency: Required value"),
    Rule("spec.objective.latency.threshold", "1.5s", ABSENT, "latency.threshold is required"),
    Rule("spec.objective.latency.threshold", "900us", "40", "threshold must be a duration above 0 in us, ms and s"),
    Rule("spec.objective.latency.threshold", "1ms", "0ms", "threshold must be a duration above 0 in us, ms and s"),
    Rule("spec.objective.latency.threshold", "1s", "1m", "threshold must be a duration above 0 in us, ms and s"),
    Rule("spec.objective.latency.threshold", "1s", "-1s", "threshold must be a duration above 0 in us, ms and s"),
    Rule("spec.objective.latency.threshold", "1s", 40, "must be of type string"),
    Rule(
        "spec.objective",
        {"latency": {"timePerToken": "50ms"}, "accuracy": {"maxLoss": "0.05", "output": "RougeL"}},
        {"latency": {"percentile": 90}, "accuracy": {"maxLoss": "0.05", "output": "RougeL"}},
        "for generated answers timeToFirstToken or timePerToken may stand in its place",
    ),
    Rule(
        "spec.objective",
        {
            "latency": {"threshold": "30s", "timeToFirstToken": "2s", "timePerToken": "50ms"},
            "accuracy": {"maxLoss": "0.05", "output": "ExactAnswer"},
        },
        {"latency": {"threshold": "30s", "timeToFirstToken": "2s"}, "accuracy": {"maxDisagreement": "0.05"}},
        "latency.timeToFirstToken and latency.timePerToken are about generated answers",
    ),
    *(
        Rule(
            "spec.objective",
            {"latency": {name: "1.5s"}, "accuracy": {"maxLoss": "0.05", "output": "TokenF1"}},
            {"latency": {name: "0s"}, "accuracy": {"maxLoss": "0.05", "output": "TokenF1"}},
            f"{name} must be a duration above 0 in us, ms and s",
        )
        for name in ("timeToFirstToken", "timePerToken")
    ),
    Rule(
        "spec",
        {
            "model": {"uri": "file:///bundles/x"},
            "objective": {"latency": {"threshold": "30s"}, "accuracy": {"maxLoss": "0.05", "output": "RougeL"}},
            "deadlineAnswers": "Always",
        },
        {
            "model": {"uri": "file:///bundles/x"},
            "objective": {"latency": {"timePerToken": "1s"}, "accuracy": {"maxLoss": "0.05", "output": "RougeL"}},
            "deadlineAnswers": "Always",
        },
        "deadlineAnswers Always needs objective.latency.threshold",
    ),
    Rule(
        "spec.objective.latency.threshold",
        "1s500ms",
        "1s 500ms",
        "threshold must be a duration above 0 in us, ms and s",
    ),
    Rule("spec.objective.latency.percentile", 50, 49, "percentile must be a whole number or a quoted decimal"),
    Rule("spec.objective.latency.percentile", 99, 100, "percentile must be a whole number or a quoted decimal"),
    Rule("spec.objective.latency.percentile", "99.9", "100", "percentile must be a whole number or a quoted decimal"),
    Rule("spec.objective.latency.percentile", "99.999", "99.9999", "Too long"),
    Rule("spec.objective.latency.percentile", "95", "p95", "percentile must be a whole number or a quoted decimal"),
    Rule("spec.objective.latency.percentile", "50.0", 99.9, "must be of type"),
    Rule("spec.objective.accuracy", {"maxDisagreement": "0.01"}, ABSENT, "spec.objective.accuracy: Required value"),
    Rule(
        "spec.objective.accuracy.maxDisagreement",
        "0.5",
        ABSENT,
        "set maxDisagreement, or maxLoss where answers are generated",
    ),
    Rule(
        "spec.objective.accuracy.maxDisagreement",
        "0.000001",
        "0.0",
        "maxDisagreement must be a quoted decimal above 0 and at most 0.5",
    ),
    Rule(
        "spec.objective.accuracy.maxDisagreement",
        "0.5",
        "0.500001",
        "maxDisagreement must be a quoted decimal above 0 and at most 0.5",
    ),
    Rule(
        "spec.objective.accuracy.maxDisagreement",
        "0.01",
        "1%",
        "maxDisagreement must be a quoted decimal above 0 and at most 0.5",
    ),
    Rule("spec.objective.accuracy.maxDisagreement", "0.01", "0.0000001", "with at most 6 decimals"),
    Rule("spec.objective.accuracy.maxDisagreement", "0.01", 0.01, "must be of type string"),
    Rule(
        "spec.objective.accuracy.slices",
        [{"name": "night", "maxDisagreement": "0.02"}],
        [{"name": "night"}],
        "maxDisagreement: Required value",
    ),
    Rule(
        "spec.objective.accuracy.slices",
        [{"name": "a", "maxDisagreement": "0.02"}],
        [{"name": "a", "maxDisagreement": "0.1"}] * 2,
        "Duplicate value",
    ),
    Rule(
        "spec.objective.accuracy.slices",
        [{"name": "a" * 32, "maxDisagreement": "0.5"}],
        [{"name": "Night", "maxDisagreement": "0.5"}],
        "a slice's name must have lower-case letters",
    ),
    Rule(
        "spec.objective.accuracy.slices",
        [{"name": "0", "maxDisagreement": "0.5"}],
        [{"name": "0", "maxDisagreement": "0.6"}],
        "maxDisagreement of a slice must be a quoted decimal",
    ),
    Rule(
        "spec.objective.accuracy.slices",
        [{"name": f"s{i}", "maxDisagreement": "0.1"} for i in range(8)],
        [{"name": f"s{i}", "maxDisagreement": "0.1"} for i in range(9)],
        "must have at most 8 items",
    ),
    Rule(
        "spec.objective.tiers",
        [{"name": "Strict_1.0", "maxDisagreement": "0.005"}],
        [{"name": "-strict", "maxDisagreement": "0.005"}],
        "a tier's name must be as the value of a label",
    ),
    Rule(
        "spec.objective.tiers",
        [{"name": "a" * 63, "maxDisagreement": "0.001"}],
        [{"name": "default", "maxDisagreement": "0.001"}],
        "default is what requests may call the budget in accuracy",
    ),
    Rule(
        "spec.objective.tiers",
        [{"name": "a", "maxDisagreement": "0.001"}],
        [{"name": "a", "maxDisagreement": "0.4999"}],
        "a tier only tightens",
    ),
    Rule(
        "spec.objective.tiers",
        [{"name": "a", "maxDisagreement": "0.001"}],
        [{"name": "a", "maxDisagreement": "0"}],
        "maxDisagreement of a tier must be a quoted decimal",
    ),
    Rule(
        "spec.objective.tiers",
        [{"name": f"t{i}", "maxDisagreement": "0.001"} for i in range(8)],
        [{"name": f"t{i}", "maxDisagreement": "0.001"} for i in range(9)],
        "must have at most 8 items",
    ),
    Rule(
        "spec.objective.tiers",
        [{"name": "over", "maxDisagreement": "0.001"}],
        [{"name": "overload", "maxDisagreement": "0.001"}],
        "overload is the budget in objective.overload",
    ),
    Rule(
        "spec.objective.overload",
        {"maxDisagreement": "0.4"},
        {"maxDisagreement": "0.0001"},
        "must be above accuracy.maxDisagreement",
    ),
    Rule(
        "spec.objective.overload",
        {"maxDisagreement": "0.5"},
        {"maxDisagreement": "0.6"},
        "overload.maxDisagreement must be a quoted decimal above accuracy.maxDisagreement and at most 0.5",
    ),
    Rule(
        "spec.objective.overload",
        {"maxDisagreement": "0.5"},
        {},
        "maxDisagreement: Required value",
    ),
    Rule(
        "spec.objective.accuracy.classes",
        [{"class": 0, "maxDisagreement": "0.02"}],
        [{"class": 0}],
        "maxDisagreement: Required value",
    ),
    Rule(
        "spec.objective.accuracy.classes",
        [{"class": 99_999, "maxDisagreement": "0.5"}],
        [{"class": -1, "maxDisagreement": "0.5"}],
        "should be greater than or equal to 0",
    ),
    Rule(
        "spec.objective.accuracy.classes",
        [{"class": 1, "maxDisagreement": "0.02"}],
        [{"class": 1, "maxDisagreement": "0.1"}] * 2,
        "Duplicate value",
    ),
    Rule(
        "spec.objective.accuracy.classes",
        [{"class": 1, "maxDisagreement": "0.5"}],
        [{"class": 1, "maxDisagreement": "0.6"}],
        "maxDisagreement of a class must be a quoted decimal",
    ),
    Rule(
        "spec.objective.accuracy.classes",
        [{"class": i, "maxDisagreement": "0.1"} for i in range(8)],
        [{"class": i, "maxDisagreement": "0.1"} for i in range(9)],
        "must have at most 8 items",
    ),
    Rule(
        "spec.objective.accuracy",
        {"maxLoss": "0.05", "output": "TokenF1"},
        {"maxLoss": "0.05"},
        "set the one that fits output",
    ),
    Rule(
        "spec.objective.accuracy",
        {"maxDisagreement": "0.05"},
        {"maxDisagreement": "0.05", "output": "RougeL"},
        "maxLoss is the budget of generated answers",
    ),
    Rule(
        "spec.objective.accuracy",
        {"maxLoss": "0.05", "output": "RougeL"},
        {"maxLoss": "0.05", "maxDisagreement": "0.05", "output": "RougeL"},
        "and not both",
    ),
    Rule(
        "spec.objective.accuracy",
        {"maxLoss": "0.5", "output": "RougeL"},
        {"maxLoss": "0.51", "output": "RougeL"},
        "maxLoss must be a quoted decimal above 0 and at most 0.5",
    ),
    Rule(
        "spec.objective.accuracy",
        {"maxLoss": "0.05", "output": "ExactAnswer", "answerPattern": "#### ([0-9]+)"},
        {"maxLoss": "0.05", "output": "TokenF1", "answerPattern": "x"},
        "it needs output ExactAnswer",
    ),
    Rule(
        "spec.objective.accuracy",
        {"maxLoss": "0.05", "output": "TokenF1", "sampledAnswers": "Lossy"},
        {"maxDisagreement": "0.05", "sampledAnswers": "Lossy"},
        "sampledAnswers is about generated answers",
    ),
    Rule(
        "spec.objective.accuracy",
        {"maxLoss": "0.05", "output": "TokenF1", "sampledAnswers": "Exact"},
        {"maxLoss": "0.05", "output": "TokenF1", "sampledAnswers": "Never"},
        "Unsupported value",
    ),
    Rule(
        "spec.objective.accuracy",
        {"maxDisagreement": "0.1", "output": "MultiLabel"},
        {"maxDisagreement": "0.1", "output": "MultiLabel", "everyClass": {"count": 3, "maxDisagreement": "0.1"}},
        "classes and everyClass are about answers that name one class",
    ),
    Rule("spec.objective.accuracy.output", "Embedding", "TopFive", "Unsupported value"),
    Rule(
        "spec.objective.accuracy.everyClass",
        {"count": 32, "maxDisagreement": "0.1"},
        {"count": 33, "maxDisagreement": "0.1"},
        "should be less than or equal to 32",
    ),
    Rule(
        "spec.objective.accuracy.everyClass",
        {"count": 2, "maxDisagreement": "0.1"},
        {"count": 1, "maxDisagreement": "0.1"},
        "should be greater than or equal to 2",
    ),
    Rule(
        "spec.objective.accuracy.everyClass",
        {"count": 2, "maxDisagreement": "0.1"},
        {"count": 2},
        "maxDisagreement: Required value",
    ),
    Rule(
        "spec.objective.accuracy.everyClass",
        {"count": 2, "maxDisagreement": "0.1"},
        {"count": 2, "maxDisagreement": "0"},
        "maxDisagreement of every class must be a quoted decimal",
    ),
    Rule(
        "spec.objective.accuracy.confidence",
        "0.999",
        "0.5",
        "confidence must be a quoted decimal above 0.5 and below 1",
    ),
    Rule(
        "spec.objective.accuracy.confidence",
        "0.500001",
        "1.0",
        "confidence must be a quoted decimal above 0.5 and below 1",
    ),
    Rule("spec.objective.accuracy.output", "Top1", "Top5", 'Unsupported value: "Top5"'),
    Rule("spec.ramps.mode", "Recommend", "Sometimes", 'Unsupported value: "Sometimes"'),
    Rule("spec.ramps", {"mode": "Pinned", "pin": PIN}, {"mode": "Pinned"}, "ramps.mode Pinned needs ramps.pin"),
    Rule(
        "spec.ramps", {"mode": "Pinned", "pin": PIN}, {"mode": "Auto", "pin": PIN}, "ramps.pin needs ramps.mode Pinned"
    ),
    Rule("spec.ramps", {"mode": "Disabled"}, {"pin": PIN}, "ramps.pin needs ramps.mode Pinned"),
    Rule("spec.ramps.maxOverhead", "0.000001", "0", "maxOverhead must be a quoted decimal above 0 and at most 1"),
    Rule("spec.ramps.maxOverhead", "1", "1.1", "maxOverhead must be a quoted decimal above 0 and at most 1"),
    Rule("spec.ramps.precision", "Exact", "int8", 'Unsupported value: "int8"'),
    Rule("spec.ramps.training", "Prepared", "Sometimes", 'Unsupported value: "Sometimes"'),
    Rule(
        "spec.ramps",
        {"training": "LiveTraffic", "store": {"claimName": "ramps.v1"}},
        {"training": "LiveTraffic"},
        "ramps.training LiveTraffic needs a ramp-set store",
    ),
    Rule("spec.ramps.store", {"claimName": "ramps"}, {}, "spec.ramps.store.claimName: Required value"),
    Rule("spec.ramps.store.claimName", "a" * 253, "Ramps", "claimName must name a PersistentVolumeClaim"),
    Rule(
        "spec.ramps.store",
        {"claimName": "ramps"},
        {"claimName": "ramps", "path": "x"},
        'unknown field "spec.ramps.store.path"',
    ),
    Rule(
        "spec.ramps",
        {"mode": "Pinned", "pin": INT8_PIN},
        {"mode": "Pinned", "precision": "Exact", "pin": INT8_PIN},
        "ramps.precision Exact allows fp32 alone",
    ),
    Rule(
        "spec.ramps",
        {"mode": "Pinned", "pin": {"ramps": [], "precision": "int8"}},
        {"mode": "Pinned", "pin": {"ramps": []}},
        "ramps.pin.ramps must name a ramp",
    ),
    Rule("spec.ramps.holdback", "0", "-0.1", "holdback must be a quoted decimal from 0 to 0.5"),
    Rule("spec.ramps.holdback", "0.5", "0.51", "holdback must be a quoted decimal from 0 to 0.5"),
    Rule("spec.ramps.holdback", "0.000001", "0.0000001", "with at most 6 decimals"),
    Rule("spec.ramps.holdback", "0.02", 0.02, "must be of type string"),
    Rule("spec.ramps.maxActive", 1, 0, "should be greater than or equal to 1"),
    Rule("spec.ramps.maxActive", 6, 7, "should be less than or equal to 6"),
    Rule("spec.execution", "ComputeSaving", "Fast", 'Unsupported value: "Fast"'),
    Rule("spec.batching.policy", "Clockwork", "clockwork", 'Unsupported value: "clockwork"'),
    Rule("spec.batching", {"policy": "TFServing"}, {"size": 8}, 'unknown field "spec.batching.size"'),
    Rule("spec.deadlineAnswers", "Always", "Never", 'Unsupported value: "Never"'),
    Rule("spec.predictionCache", {"sizeLimit": "256Mi"}, {}, "spec.predictionCache.sizeLimit: Required value"),
    Rule(
        "spec.predictionCache.sizeLimit",
        "1000000",
        "0",
        "sizeLimit must be a whole number from 1 on with no unit or Ki, Mi or Gi",
    ),
    Rule("spec.predictionCache.sizeLimit", "1024Gi", "1025Gi", "at most 1Ti"),
    Rule(
        "spec.predictionCache.sizeLimit",
        "64Mi",
        "64MB",
        "sizeLimit must be a whole number from 1 on with no unit or Ki, Mi or Gi",
    ),
    Rule("spec.feedback", {"maxAnswers": 10_000}, {}, "spec.feedback.maxAnswers: Required value"),
    Rule("spec.feedback", {"maxAnswers": 1}, {"maxAnswers": 1, "keep": "1h"}, 'unknown field "spec.feedback.keep"'),
    Rule("spec.feedback.maxAnswers", 1, 0, "should be greater than or equal to 1"),
    Rule("spec.feedback.maxAnswers", 1_000_000, 1_000_001, "should be less than or equal to 1000000"),
    Rule("spec.feedback.maxAnswers", 10_000, "10000", "must be of type integer"),
    Rule("spec.protocols", ["HTTP", "GRPC"], ["GRPC"], "protocols must contain HTTP"),
    Rule("spec.protocols", ["HTTP"], ["HTTP", "REST"], 'Unsupported value: "REST"'),
    Rule("spec.protocols", ["GRPC", "HTTP"], ["HTTP", "HTTP"], "Duplicate value"),
    Rule("spec.rollout.promotion", "Manual", "Later", 'Unsupported value: "Later"'),
    Rule("spec.rollout.onInconclusive", "Hold", "Promote", 'Unsupported value: "Promote"'),
    Rule("spec.rollout.confidence", "0.999", "0.4", "confidence must be a quoted decimal above 0.5 and below 1"),
    Rule("spec.rollout.stepDeadline", "90s", "0s", "stepDeadline must be a duration above 0"),
    Rule("spec.rollout.stepDeadline", "1.5h", "1h30", "stepDeadline must be a duration above 0"),
    Rule("spec.rollout.stepDeadline", "1h30m", "0h0m", "stepDeadline must be a duration above 0"),
    Rule("spec.rollout.cooldown", "0s", "tomorrow", "cooldown must be a duration in us, ms, s, m and h"),
    Rule("spec.rollout.rollbackWindow", 20, 21, "should be less than or equal to 20"),
    Rule("spec.rollout.rollbackWindow", 0, -1, "should be greater than or equal to 0"),
    Rule("spec.rollout.historyLimit", 1, 0, "should be greater than or equal to 1"),
    Rule("spec.rollout.historyLimit", 100, 101, "should be less than or equal to 100"),
    Rule(
        "spec.rollout.steps",
        [{"weight": 1, "pause": "90s"}],
        [{"weight": 1, "pause": "0s"}],
        "pause must be a duration above 0",
    ),
    Rule(
        "spec.rollout.steps",
        [{"weight": 1}, {"weight": 100}],
        [{"weight": 5}, {"weight": 5}],
        "weights of rollout.steps must rise from step to step",
    ),
    Rule(
        "spec.rollout.steps",
        [{"weight": 50}],
        [{"weight": 25}, {"weight": 5}],
        "weights of rollout.steps must rise from step to step",
    ),
    Rule(
        "spec.rollout.steps",
        [{"weight": w + 1} for w in range(12)],
        [{"weight": w + 1} for w in range(13)],
        "must have at most 12 items",
    ),
    Rule("spec.rollout.steps", [{"weight": 100}], [], "should have at least 1 items"),
    Rule("spec.rollout.steps", [{"weight": 1}], [{"weight": 0}], "should be greater than or equal to 1"),
    Rule("spec.rollout.steps", [{"weight": 100}], [{"weight": 101}], "should be less than or equal to 100"),
    Rule("spec.rollout.steps", [{"weight": 5, "pause": "10m"}], [{"pause": "10m"}], "steps[0].weight: Required value"),
    Rule(
        "spec.rollout.steps",
        [{"weight": 5, "pause": "1s"}],
        [{"weight": 5, "pause": "0s"}],
        "pause must be a duration above 0",
    ),
    Rule("spec.replicas", 0, -1, "should be greater than or equal to 0"),
    Rule("spec.replicas", 1000, 1001, "should be less than or equal to 1000"),
    Rule("spec.suspend", True, "yes", "must be of type boolean"),
    Rule("spec.updatePolicy.type", "Recreate", "OnDelete", 'Unsupported value: "OnDelete"'),
    Rule("spec.updatePolicy.maxSurge", 3, 0, "maxSurge must be a whole number from 1 to 1000 or a share"),
    Rule("spec.updatePolicy.maxSurge", "10%", "0%", "maxSurge must be a whole number from 1 to 1000 or a share"),
    Rule("spec.updatePolicy.maxSurge", "100%", "101%", "maxSurge must be a whole number from 1 to 1000 or a share"),
    Rule(
        "spec.worker.disruptionBudget",
        {"maxUnavailable": "25%"},
        {"maxUnavailable": "few"},
        "maxUnavailable must be a whole number",
    ),
    Rule(
        "spec.worker.disruptionBudget",
        {"maxUnavailable": 2},
        {"minAvailable": 1},
        'unknown field "spec.worker.disruptionBudget.minAvailable"',
    ),
    Rule("spec.updatePolicy.recreateDeadline", "90s", "0s", "recreateDeadline must be a duration above 0"),
    Rule(
        "spec.updatePolicy",
        {"type": "ResourceAware", "sideBySide": {}},
        {"type": "Recreate", "sideBySide": {}},
        "type Recreate has room for one",
    ),
    Rule("spec.updatePolicy.surgeDeadline", "0s", "soon", "surgeDeadline must be a duration in us, ms, s, m and h"),
    Rule("spec.updatePolicy.sideBySide", {}, {"share": 20}, 'unknown field "spec.updatePolicy.sideBySide.share"'),
    Rule("spec.updatePolicy.sideBySide", {"weight": 50}, {"weight": 51}, "should be less than or equal to 50"),
    Rule("spec.updatePolicy.sideBySide", {"weight": 1}, {"weight": 0}, "should be greater than or equal to 1"),
    Rule(
        "spec.updatePolicy.sideBySide",
        {"pause": "0s"},
        {"pause": "soon"},
        "pause must be a duration in us, ms, s, m and h",
    ),
    Rule("spec.updatePolicy.sideBySide", {"promotion": "Manual"}, {"promotion": "Later"}, 'Unsupported value: "Later"'),
    Rule(
        "spec.updatePolicy.sideBySide",
        {"deadline": "90s"},
        {"deadline": "0s"},
        "deadline must be a duration above 0 in us, ms, s, m and h",
    ),
    Rule(
        "spec.updatePolicy.sideBySide.gateway",
        {"parentRefs": [{"name": "public"}]},
        {},
        "gateway.parentRefs: Required value",
    ),
    Rule("spec.route", {"parentRefs": [{"name": "public"}]}, {}, "route.parentRefs: Required value"),
    Rule(
        "spec.updatePolicy.sideBySide.gateway",
        {"parentRefs": [{"name": "a"}, {"name": "b"}]},
        {"parentRefs": []},
        "should have at least 1 items",
    ),
    Rule(
        "spec.route", {"parentRefs": [{"name": "a"}, {"name": "b"}]}, {"parentRefs": []}, "should have at least 1 items"
    ),
    Rule(
        "spec.updatePolicy.sideBySide.gateway",
        {"parentRefs": [{"group": "", "kind": "Service", "name": "digits", "port": 80}]},
        {"parentRefs": [{"name": "a", "port": 0}]},
        "should be greater than or equal to 1",
    ),
    Rule(
        "spec.route",
        {"parentRefs": [{"group": "", "kind": "Service", "name": "digits", "port": 80}]},
        {"parentRefs": [{"name": "a", "port": 0}]},
        "should be greater than or equal to 1",
    ),
    Rule(
        "spec.updatePolicy.sideBySide.gateway",
        {"parentRefs": [{"name": "public", "namespace": "infra", "sectionName": "https"}]},
        {"parentRefs": [{"name": "a", "namespace": "In fra"}]},
        "namespace must be the name of a namespace",
    ),
    Rule(
        "spec.route",
        {"parentRefs": [{"name": "public", "namespace": "infra", "sectionName": "https"}]},
        {"parentRefs": [{"name": "a", "namespace": "In fra"}]},
        "namespace must be the name of a namespace",
    ),
    Rule(
        "spec.updatePolicy.sideBySide.gateway",
        {"parentRefs": [{"name": "my.gateway"}]},
        {"parentRefs": [{"name": "Public!"}]},
        "name must be the name of a Gateway",
    ),
    Rule(
        "spec.route",
        {"parentRefs": [{"name": "my.gateway"}]},
        {"parentRefs": [{"name": "Public!"}]},
        "name must be the name of a Gateway",
    ),
    Rule(
        "spec.updatePolicy.sideBySide.gateway",
        {"parentRefs": [{"name": "a", "sectionName": "http"}]},
        {"parentRefs": [{"name": "a", "sectionName": "_"}]},
        "sectionName must be the name of a listener",
    ),
    Rule(
        "spec.route",
        {"parentRefs": [{"name": "a", "sectionName": "http"}]},
        {"parentRefs": [{"name": "a", "sectionName": "_"}]},
        "sectionName must be the name of a listener",
    ),
    Rule(
        "spec.updatePolicy.sideBySide.gateway",
        {"parentRefs": [{"name": "a", "group": "mesh.example"}]},
        {"parentRefs": [{"name": "a", "group": "Mesh"}]},
        "group must be an API group",
    ),
    Rule(
        "spec.route",
        {"parentRefs": [{"name": "a", "group": "mesh.example"}]},
        {"parentRefs": [{"name": "a", "group": "Mesh"}]},
        "group must be an API group",
    ),
    Rule(
        "spec.updatePolicy.sideBySide.gateway",
        {"parentRefs": [{"name": "a", "kind": "Gateway"}]},
        {"parentRefs": [{"name": "a", "kind": "-"}]},
        "kind must be a kind",
    ),
    Rule(
        "spec.route",
        {"parentRefs": [{"name": "a", "kind": "Gateway"}]},
        {"parentRefs": [{"name": "a", "kind": "-"}]},
        "kind must be a kind",
    ),
    Rule(
        "spec.updatePolicy.sideBySide.gateway",
        {"parentRefs": [{"name": "a"}, {"name": "a", "port": 443}]},
        {"parentRefs": [{"name": "a"}] * 2},
        "every parent must be named once",
    ),
    Rule(
        "spec.route",
        {"parentRefs": [{"name": "a"}, {"name": "a", "port": 443}]},
        {"parentRefs": [{"name": "a"}] * 2},
        "every parent must be named once",
    ),
    Rule(
        "spec.updatePolicy.sideBySide.gateway",
        {"parentRefs": [{"name": "a"}], "hostnames": ["*.example.com", "models"]},
        {"parentRefs": [{"name": "a"}], "hostnames": ["Models.example.com"]},
        "every host name must be in lower case",
    ),
    Rule(
        "spec.route",
        {"parentRefs": [{"name": "a"}], "hostnames": ["*.example.com", "models"]},
        {"parentRefs": [{"name": "a"}], "hostnames": ["Models.example.com"]},
        "every host name must be in lower case",
    ),
    Rule(
        "spec.updatePolicy.sideBySide.gateway",
        {"parentRefs": [{"name": "a"}], "hostnames": ["a.example", "b.example"]},
        {"parentRefs": [{"name": "a"}], "hostnames": ["a.example"] * 2},
        "Duplicate value",
    ),
    Rule(
        "spec.route",
        {"parentRefs": [{"name": "a"}], "hostnames": ["a.example", "b.example"]},
        {"parentRefs": [{"name": "a"}], "hostnames": ["a.example"] * 2},
        "Duplicate value",
    ),
    Rule(
        "spec.updatePolicy.sideBySide.gateway",
        {"parentRefs": [{"name": "a"}]},
        {"parentRefs": [{"name": "a"}], "rules": []},
        'unknown field "spec.updatePolicy.sideBySide.gateway.rules"',
    ),
    Rule(
        "spec.route",
        {"parentRefs": [{"name": "a"}]},
        {"parentRefs": [{"name": "a"}], "rules": []},
        'unknown field "spec.route.rules"',
    ),
    Rule("spec.worker.image", "offramp/worker:1", "", "should be at least 1 chars long"),
    Rule("spec.worker.imagePullPolicy", "Never", "Maybe", 'Unsupported value: "Maybe"'),
    Rule(
        "spec.worker.imagePullSecrets",
        [{"name": "registry"}],
        [{"name": "Registry!"}],
        "name must be the name of a Secret",
    ),
    Rule(
        "spec.worker.resources",
        {"limits": {"cpu": 2, "memory": "4Gi"}},
        {"limits": {"memory": "4 GB"}},
        "every resource must be a quantity that is not negative",
    ),
    Rule(
        "spec.worker.resources",
        {"requests": {"cpu": "500m"}},
        {"requests": {"cpu": "-1"}},
        "every resource must be a quantity that is not negative",
    ),
    Rule(
        "spec.worker.resources",
        {"requests": {"cpu": "1"}, "limits": {"cpu": "1000m"}},
        {"requests": {"cpu": 3}, "limits": {"cpu": "2"}},
        "requests must not exceed limits",
    ),
    Rule(
        "spec.worker.nodeSelector",
        {"kubernetes.io/arch": "amd64"},
        {"arch": "a m d"},
        "every entry of nodeSelector must be a label",
    ),
    Rule(
        "spec.worker.tolerations",
        [{"key": "gpu", "value": "yes"}],
        [{"key": "gpu", "operator": "Exists", "value": "yes"}],
        "operator Exists must not have a value",
    ),
    Rule(
        "spec.worker.tolerations",
        [{"operator": "Exists"}],
        [{"effect": "NoSchedule"}],
        "a toleration without a key must have operator Exists",
    ),
    Rule(
        "spec.worker.tolerations",
        [{"key": "gpu", "effect": "NoExecute", "tolerationSeconds": 5}],
        [{"key": "gpu", "tolerationSeconds": 5}],
        "tolerationSeconds needs effect NoExecute",
    ),
    Rule(
        "spec.worker.tolerations",
        [{"key": "gpu", "effect": "NoSchedule"}],
        [{"key": "gpu", "effect": "Never"}],
        'Unsupported value: "Never"',
    ),
    Rule(
        "spec.worker.affinity",
        {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        {"nodes": {}},
        'unknown field "spec.worker.affinity.nodes"',
    ),
    Rule(
        "spec.worker.topologySpreadConstraints",
        [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "minDomains": 2}],
        [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "minDomains": 2}],
        "minDomains needs whenUnsatisfiable DoNotSchedule",
    ),
    Rule(
        "spec.worker.topologySpreadConstraints",
        [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
        [{"maxSkew": 0, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
        "should be greater than or equal to 1",
    ),
    Rule("spec.worker.priorityClassName", "high", "High", "must be the name of an object"),
    Rule("spec.worker.runtimeClassName", "nvidia", "nv idia", "must be the name of an object"),
    Rule("spec.worker.schedulerName", "volcano", "_", "must be the name of an object"),
    Rule(
        "spec.worker.env",
        [{"name": "LOG_LEVEL", "value": "debug"}],
        [{"name": "LOG-LEVEL", "value": "debug"}],
        "must contain only letters, digits and '_'",
    ),
    Rule(
        "spec.worker.env",
        [{"name": "NOT_OFFRAMP_PORT", "value": "1"}],
        [{"name": "OFFRAMP_PORT", "value": "1"}],
        "names that start with OFFRAMP_ are set by the operator",
    ),
    Rule(
        "spec.worker.env",
        [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}],
        [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}],
        "Duplicate value",
    ),
    Rule(
        "spec.worker.env",
        [{"name": "A", "value": ""}],
        [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
        'unknown field "spec.worker.env[0].valueFrom"',
    ),
    Rule("spec.worker.labels", {"team": "vision"}, {"team": "two words"}, "every entry of labels must be a label"),
    Rule(
        "spec.worker.labels",
        {"kueue.x-k8s.io/queue-name": "gpu"},
        {"app.kubernetes.io/name": "mine"},
        "are set by the operator",
    ),
    Rule("spec.worker.labels", {"example.dev/a": "b"}, {"earlyexit.dev/service": "other"}, "are set by the operator"),
    Rule(
        "spec.worker.annotations",
        {"example.com/note": "two words"},
        {"not a key": "x"},
        "every key of annotations must be a qualified name",
    ),
    Rule(
        "spec.worker.annotations",
        {"sidecar.example.com/inject": "false"},
        {"earlyexit.dev/x": "y"},
        "annotations of earlyexit.dev/ are set by the operator",
    ),
    Rule(
        "spec.worker.annotations",
        {"a": "b"},
        {"container.apparmor.security.beta.kubernetes.io/worker": "unconfined"},
        "change the pod's confinement are not allowed",
    ),
    Rule("spec.worker.serviceAccountName", ABSENT, "admin", 'unknown field "spec.worker.serviceAccountName"'),
    Rule("spec.worker.securityContext", ABSENT, {"privileged": True}, 'unknown field "spec.worker.securityContext"'),
    Rule("spec.worker.volumes", ABSENT, [{"hostPath": {"path": "/"}}], 'unknown field "spec.worker.volumes'),
]

POOLS = [{"name": "fast", "replicas": 1, "nodeSelector": {"pool": "fast"}}, {"name": "slow", "replicas": 2}]
OWN = {"uri": "oci://offramp/digits-cuda:1"}
POOL_RULES: list[Rule] = [
    Rule("spec.pools", POOLS, [], "spec.pools"),
    Rule("spec.pools", POOLS[:1], [POOLS[0], POOLS[0]], "Duplicate value"),
    Rule("spec.pools", POOLS, [{"name": f"p{i}", "replicas": 1} for i in range(9)], "must have at most 8 items"),
    Rule(
        "spec.pools",
        [{"name": f"p{i}", "replicas": 500} for i in range(2)],
        [{"name": f"p{i}", "replicas": 501} for i in range(2)],
        "pools must not ask for more than 1000 workers in all",
    ),
    Rule("spec.pools.0.name", "gpu-4", "GPU 4", "name of a pool must have lower-case letters"),
    Rule("spec.pools.0.name", "g" * 20, "g" * 21, "Too long"),
    Rule("spec.pools.0.name", "mainly", "main", "main and next are names of the Services of versions"),
    Rule("spec.pools.0.name", "next-1", "next", "main and next are names of the Services of versions"),
    Rule("spec.pools.0.replicas", 0, -1, "should be greater than or equal to 0"),
    Rule("spec.pools.0.replicas", 998, ABSENT, "say how many workers the pool has (replicas)"),
    Rule("spec.pools.0.nodeSelector", {"pool": "a"}, {"pool": "a b"}, "every entry of nodeSelector must be a label"),
    Rule(
        "spec.pools.0.resources", {"limits": {"cpu": 1}}, {"limits": {"cpu": "-1"}}, "every resource must be a quantity"
    ),
    Rule("spec.pools.0.image", "offramp/worker-cuda:1", "", "should be at least 1 chars long"),
    Rule("spec.pools.1.model", OWN, {}, "spec.pools[1].model.uri: Required value"),
    Rule("spec.pools.1.model", OWN, {"uri": "digits"}, "uri must be oci://IMAGE, pvc://CLAIM/PATH"),
    Rule("spec.pools.1.model", OWN, {"uri": "file:///b"}, "uri of a pool's bundle must be oci://, pvc://"),
    Rule("spec.pools.1.model", OWN, OWN | {"digest": DIGEST}, 'unknown field "spec.pools[1].model.digest"'),
    Rule("spec.pools.1.model", OWN, OWN | {"secretRef": {"name": "a"}}, "secretRef is for https:// and s3://"),
    Rule("spec.pools.1.model", OWN, OWN | {"archiveDigest": DIGEST}, "spec.model.digest holds for all pools"),
    Rule("spec.pools.1.model", OWN, OWN | {"region": "a"}, "endpoint and region are for s3://"),
    Rule("spec.pools", [POOLS[0], POOLS[1] | {"model": OWN}], [POOLS[0] | {"model": OWN}], "each has a model of its"),
    Rule("spec.pools.0.runtimeClassName", ABSENT, "nvidia", 'unknown field "spec.pools[0].runtimeClassName"'),
]
PRICED = [
    {"name": "fast", "costPerHour": "0.17", "minWorkers": 1, "maxWorkers": 4},
    {"name": "slow", "costPerHour": "0.04", "maxWorkers": 8},
]
PRICED_RULES: list[Rule] = [
    Rule("spec.pools.0.costPerHour", "0.0001", "0", "costPerHour must be a quoted decimal from 0.0001 to 100000"),
    Rule("spec.pools.0.costPerHour", "100000", "cheap", "costPerHour must be a quoted decimal from 0.0001 to 100000"),
    Rule("spec.pools.0.costPerHour", "17", 0.17, "must be of type string"),
    Rule("spec.pools.0.costPerHour", "0.2", ABSENT, "costPerHour and maxWorkers belong together"),
    Rule("spec.pools.0.minWorkers", 4, 5, "minWorkers must not exceed maxWorkers"),
    Rule("spec.pools.0.maxWorkers", 1, 0, "should be greater than or equal to 1"),
    Rule("spec.pools.0.maxWorkers", 992, 993, "pools must not ask for more than 1000 workers in all"),
    Rule(
        "spec.pools",
        [pool | {"replicas": 1} for pool in PRICED],
        [PRICED[0] | {"replicas": 1}, PRICED[1]],
        "some have replicas and others not",
    ),
    Rule(
        "spec.pools",
        [pool | {"replicas": 500, "maxWorkers": 1, "minWorkers": 0} for pool in PRICED],
        [pool | {"replicas": 501, "maxWorkers": 1, "minWorkers": 0} for pool in PRICED],
        "pools must not ask for more than 1000 workers in all",
    ),
    Rule("spec.pools.0.className", "large", "Large", "className must be the name of a WorkerClass"),
    Rule(
        "spec.pools",
        [pool | {"className": f"of-{pool['name']}"} for pool in PRICED],
        [pool | {"className": "large"} for pool in PRICED],
        "two pools name one className; give each a WorkerClass of its own",
    ),
    Rule("spec.pools", PRICED[:1], [PRICED[0], {"name": "b"}], "say how many workers the pool has (replicas)"),
    Rule("spec.poolPlan", {"noExitFloor": "None"}, {"noExitFloor": "PreScale"}, 'Unsupported value: "PreScale"'),
    Rule(
        "spec.pools",
        PRICED,
        [PRICED[0] | {"replicas": 1}, {"name": "b", "replicas": 1}],
        "some have maxWorkers and others not",
    ),
]

CACHE = {"sizeLimit": "1Gi"}
EDGE = {"pool": "slow"}
EDGE_RULES: list[Rule] = [
    Rule("spec.edge", {"pool": "fast"}, {}, "spec.edge.pool: Required value"),
    Rule("spec.edge.pool", "slow", "shop", "edge.pool must name one of pools; add a pool of that name"),
    Rule("spec.edge.uplink", "500kbit", "0Mbit", "uplink must be a rate above 0 such as 500kbit or 10Mbit"),
    Rule("spec.edge.uplink", "0.5Gbit/s", "10Mi", "uplink must be a rate above 0 such as 500kbit or 10Mbit"),
    Rule("spec.edge.residue", "Features", "Logits", 'Unsupported value: "Logits"'),
    Rule("spec.edge.offline", "Answer", "Wait", 'Unsupported value: "Wait"'),
    Rule("spec.edge.core", ABSENT, "http://core:8080", 'unknown field "spec.edge.core"'),
]
SCALED = {"maxReplicas": 3, "targetInFlight": 8}
SCALED_RULES: list[Rule] = [
    Rule("spec.autoscaling.maxReplicas", 1000, 1001, "should be less than or equal to 1000"),
    Rule("spec.autoscaling.maxReplicas", 1, ABSENT, "spec.autoscaling.maxReplicas: Required value"),
    Rule("spec.autoscaling.minReplicas", 1, 0, "should be greater than or equal to 1"),
    Rule("spec.autoscaling.minReplicas", 3, 4, "autoscaling.minReplicas must not exceed autoscaling.maxReplicas"),
    Rule("spec.autoscaling.targetInFlight", 100_000, 0, "should be greater than or equal to 1"),
    Rule("spec.autoscaling.targetInFlight", 1, ABSENT, "spec.autoscaling.targetInFlight: Required value"),
    Rule("spec.autoscaling.noExitFloor", "PreScale", "Always", 'Unsupported value: "Always"'),
    Rule("spec.autoscaling.metric", ABSENT, "cpu", 'unknown field "spec.autoscaling.metric"'),
]
TOGETHER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"route": ROUTE, "updatePolicy": {"sideBySide": {}}},
        {"route": ROUTE, "updatePolicy": {"sideBySide": {"gateway": ROUTE}}},
        "route takes the place of updatePolicy.sideBySide.gateway",
    ),
    (
        {"autoscaling": SCALED},
        {"autoscaling": SCALED, "replicas": 2},
        "autoscaling decides on the number of workers; remove replicas",
    ),
    ({"pools": POOLS}, {"pools": POOLS, "replicas": 2}, "pools say how many workers there are"),
    ({"pools": POOLS}, {"pools": POOLS, "autoscaling": SCALED}, "pools say how many workers there are"),
    (
        {"pools": POOLS},
        {"pools": POOLS, "updatePolicy": {"sideBySide": {}}},
        "pools and updatePolicy.sideBySide cannot be together",
    ),
    (
        {"pools": POOLS},
        {"pools": POOLS, "updatePolicy": {"type": "Recreate"}},
        "updatePolicy.type Recreate is for a service that has room for one worker",
    ),
    (
        {"pools": PRICED, "poolPlan": {"noExitFloor": "None"}},
        {"pools": POOLS, "poolPlan": {"noExitFloor": "None"}},
        "poolPlan is about pools with costPerHour and maxWorkers",
    ),
    (
        {"pools": [PRICED[0], PRICED[1] | {"model": OWN}], "poolPlan": {"noExitFloor": "Reserve"}},
        {"pools": [PRICED[0], PRICED[1] | {"model": OWN}], "poolPlan": {"noExitFloor": "None"}},
        "poolPlan.noExitFloor None counts on what exits save",
    ),
    (
        {"pools": POOLS, "objective": GENERATED},
        {"pools": [POOLS[0], POOLS[1] | {"model": OWN}], "objective": GENERATED},
        "model of a pool is of models with exits",
    ),
    (
        {"predictionCache": CACHE, "pools": [POOLS[0] | {"resources": {"limits": {"memory": "1025Mi"}}}]},
        {"predictionCache": CACHE, "pools": [POOLS[0] | {"resources": {"limits": {"memory": "1Gi"}}}]},
        "predictionCache.sizeLimit must be below the memory limit of each of pools",
    ),
    (
        {"pools": POOLS, "edge": EDGE},
        {"pools": POOLS[1:], "edge": EDGE},
        "edge.pool is the only one of pools; add another one, whose workers are the core",
    ),
    ({"pools": POOLS, "edge": EDGE}, {"edge": EDGE}, "edge.pool must name one of pools"),
    (
        {"pools": [*POOLS, {"name": "edges", "replicas": 1}]},
        {"pools": [*POOLS, {"name": "edges", "replicas": 1}], "edge": EDGE},
        "edges names the Service of the workers at the edge",
    ),
    ({"pools": PRICED}, {"pools": PRICED, "edge": {"pool": PRICED[0]["name"]}}, "edge is for pools with replicas"),
    (
        {"pools": POOLS, "objective": GENERATED},
        {"pools": POOLS, "objective": GENERATED, "edge": EDGE},
        "edge is of models with exits",
    ),
    (
        {"predictionCache": CACHE, "execution": "Auto"},
        {"predictionCache": CACHE, "execution": "ResultsOnly"},
        "predictionCache is of no use with execution ResultsOnly",
    ),
    (
        {"objective": OVERLOADED, "execution": "Auto"},
        {"objective": OVERLOADED, "execution": "ResultsOnly"},
        "objective.overload spares nothing with execution ResultsOnly",
    ),
    (
        {"objective": OVERLOADED | {"tiers": MANY_TIERS[:7]}},
        {"objective": OVERLOADED | {"tiers": MANY_TIERS}},
        "list at most 7 tiers beside overload",
    ),
    (
        {"objective": GENERATED},
        {"objective": GENERATED | {"overload": OVERLOADED["overload"]}},
        "overload is of models with exits",
    ),
    (
        {"deadlineAnswers": "Always", "execution": "ComputeSaving"},
        {"deadlineAnswers": "Always", "execution": "ResultsOnly"},
        "deadlineAnswers Always is of no use with execution ResultsOnly",
    ),
    (
        {"predictionCache": CACHE, "worker": {"resources": {"limits": {"memory": "1025Mi"}}}},
        {"predictionCache": CACHE, "worker": {"resources": {"limits": {"memory": "1Gi"}}}},
        "predictionCache.sizeLimit must be below the memory limit",
    ),
]

PIN_RULES: list[Rule] = [
    Rule("spec.ramps.pin.rampSetDigest", DIGEST, "sha256:1", "rampSetDigest must be sha256: followed by 64"),
    Rule("spec.ramps.pin.ramps", PIN["ramps"], [], "ramps.pin.ramps must name a ramp"),
    Rule("spec.ramps.pin.ramps", SEVEN_RAMPS[:6], SEVEN_RAMPS, "must have at most 6 items"),
    Rule("spec.ramps.pin.ramps", SEVEN_RAMPS[:2], [SEVEN_RAMPS[0], SEVEN_RAMPS[0]], "Duplicate value"),
    Rule("spec.ramps.pin.ramps.0.id", "r11-linear", "R04 Grid", "id must be a ramp id such as r04-grid"),
    Rule(
        "spec.ramps.pin.ramps.0.id",
        "int8/r04.grid",
        "int8/../r04",
        "id must be a ramp id such as r04-grid or int8/r04-grid",
    ),
    Rule("spec.ramps.pin.ramps.0.id", "r04-grid", ABSENT, "id: Required value"),
    Rule(
        "spec.ramps.pin.ramps.0.threshold",
        "0",
        "-0.1",
        "threshold must be a quoted decimal from 0 to 1 with at most 6 decimals",
    ),
    Rule(
        "spec.ramps.pin.ramps.0.threshold",
        "1.0",
        "1.1",
        "threshold must be a quoted decimal from 0 to 1 with at most 6 decimals",
    ),
    Rule("spec.ramps.pin.ramps.0.threshold", "0.123456", "0.1234567", "threshold"),
    Rule("spec.ramps.pin.ramps.0.threshold", "0.25", ABSENT, "threshold: Required value"),
    Rule("spec.ramps.pin.ramps.0.threshold", "0.25", 0.25, "must be of type string"),
]


def _ids(rules: list[Rule]) -> list[str]:
    return [f"{rule.path}={str(rule.bad)[:40]}" for rule in rules]


@pytest.mark.parametrize("rule", RULES, ids=_ids(RULES))
def test_a_rule_takes_the_right_and_refuses_the_wrong(api: Any, manifests: Any, rule: Rule) -> None:
    _check(api, manifests, manifests.service(), rule)


@pytest.mark.parametrize("rule", PIN_RULES, ids=_ids(PIN_RULES))
def test_a_rule_of_pins_takes_the_right_and_refuses_the_wrong(api: Any, manifests: Any, rule: Rule) -> None:
    _check(api, manifests, manifests.service(ramps={"mode": "Pinned", "pin": PIN}), rule)


@pytest.mark.parametrize("rule", SCALED_RULES, ids=_ids(SCALED_RULES))
def test_a_rule_of_autoscaling_takes_the_right_and_refuses_the_wrong(api: Any, manifests: Any, rule: Rule) -> None:
    _check(api, manifests, manifests.service(autoscaling=SCALED), rule)


@pytest.mark.parametrize("rule", POOL_RULES, ids=_ids(POOL_RULES))
def test_a_rule_of_pools_takes_the_right_and_refuses_the_wrong(api: Any, manifests: Any, rule: Rule) -> None:
    _check(api, manifests, manifests.service(pools=POOLS), rule)


@pytest.mark.parametrize("rule", EDGE_RULES, ids=_ids(EDGE_RULES))
def test_a_rule_of_the_edge_takes_the_right_and_refuses_the_wrong(api: Any, manifests: Any, rule: Rule) -> None:
    _check(api, manifests, manifests.service(pools=POOLS, edge=EDGE), rule)


@pytest.mark.parametrize("rule", PRICED_RULES, ids=_ids(PRICED_RULES))
def test_a_rule_of_pools_with_prices_takes_the_right_and_refuses_the_wrong(
    api: Any, manifests: Any, rule: Rule
) -> None:
    _check(api, manifests, manifests.service(pools=PRICED), rule)


@pytest.mark.parametrize(("good", "bad", "sentence"), TOGETHER)
def test_fields_that_do_not_go_together_are_refused(
    api: Any, manifests: Any, good: dict[str, Any], bad: dict[str, Any], sentence: str
) -> None:
    answer = api.create(manifests.service(**good))
    assert answer.status_code == 201, answer.json()["message"]
    answer = api.create(manifests.service(**bad))
    assert answer.status_code == 422 and sentence in answer.json()["message"]
    assert linted(manifests.service(**good)) == [] and sentence in "\n".join(linted(manifests.service(**bad)))


def _check(api: Any, manifests: Any, base: dict[str, Any], rule: Rule) -> None:
    answer = api.create(base if rule.good is ... else manifests.changed(base, rule.path, rule.good))
    assert answer.status_code == 201, answer.json()["message"]
    answer = api.create(manifests.changed(base, rule.path, rule.bad))
    assert answer.status_code in (400, 422), answer.text
    assert rule.sentence in answer.json()["message"]
    assert linted(base if rule.good is ... else manifests.changed(base, rule.path, rule.good)) == []
    said = "\n".join(linted(manifests.changed(base, rule.path, rule.bad)))
    assert said and (rule.sentence in said or any(word in rule.sentence for word in SCHEMA_WORDS)), said


def linted(manifest: dict[str, Any]) -> list[str]:
    """What ``offramp lint`` says of it."""
    mistakes, checked, _ = lint_text(json.dumps(manifest), "f.json")
    assert checked == 1
    return [f"{mistake.field}: {mistake.message}" for mistake in mistakes if not mistake.warning]


def test_every_default_comes_from_the_schema(api: Any, manifests: Any) -> None:
    given = manifests.service()
    spec = api.create(given).json()["spec"]
    assert spec == {
        "model": given["spec"]["model"],
        "objective": {
            "latency": {"percentile": 95, "threshold": "40ms"},
            "accuracy": {"maxDisagreement": "0.02", "confidence": "0.95", "output": "Top1"},
        },
        "ramps": {
            "mode": "Auto",
            "maxOverhead": "0.05",
            "maxActive": 3,
            "holdback": "0.02",
            "precision": "Auto",
            "training": "Prepared",
        },
        "execution": "Auto",
        "batching": {"policy": "Offramp"},
        "deadlineAnswers": "OnRequest",
        "protocols": ["HTTP"],
        "rollout": {
            "promotion": "Automatic",
            "onInconclusive": "Abort",
            "confidence": "0.99",
            "stepDeadline": "1h",
            "cooldown": "1h",
            "rollbackWindow": 3,
            "historyLimit": 10,
            "steps": [{"weight": 5}, {"weight": 25}, {"weight": 50}],
        },
        "updatePolicy": {"type": "Auto", "surgeDeadline": "5m"},
        "suspend": False,
    }


def test_a_service_may_set_everything_at_once(api: Any, manifests: Any) -> None:
    everything = manifests.service(ramps={"mode": "Pinned", "pin": PIN})
    whole = (
        "spec",
        "spec.objective",
        "spec.ramps",
        "spec.ramps.mode",
        "spec.model",
    )  # in the place of what stands there
    for rule in [*RULES, *PIN_RULES]:
        if rule.good is not ABSENT and rule.path not in (*whole, OLD_ROUTE):
            everything = manifests.changed(everything, rule.path, rule.good)
    answer = api.create(everything)
    assert answer.status_code == 201, answer.json()["message"]
    sent, stored = everything["spec"], answer.json()["spec"]
    assert {key: stored["worker"][key] for key in sent["worker"]} == sent["worker"]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_every_sample_is_taken_as_it_is(api: Any, sample: Path) -> None:
    answer = api.create(yaml.safe_load(sample.read_text()))
    assert answer.status_code == 201, answer.json()["message"]
    assert linted(yaml.safe_load(sample.read_text())) == []
