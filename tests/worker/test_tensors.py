"""Reading requests without a server: what errors say of what was sent."""

from __future__ import annotations

import json
from typing import Any

import bundles
import pytest

from offramp_core.bundle import TensorSpec
from offramp_worker.http.tensors import BadRequestError, parse_request, shown

SPEC = TensorSpec("x", "FP32", (bundles.CHANNELS, bundles.SIZE, bundles.SIZE))
LONG, DEEP = "y" * 100_000, json.loads("[" * 900 + "]" * 900)


def body(*, parameters: dict[str, Any] | None = None, outputs: list[Any] | None = None, **tensor: Any) -> bytes:
    good = {"name": "x", "datatype": "FP32", "shape": [1, bundles.CHANNELS, bundles.SIZE, bundles.SIZE], "data": []}
    return json.dumps({"inputs": [good | tensor], "parameters": parameters or {}, "outputs": outputs or []}).encode()


def _sized(value: Any) -> bytes:
    """The parameters of the tensor, not of the request."""
    whole = json.loads(body())
    whole["inputs"][0]["parameters"] = {"binary_data_size": value}
    return json.dumps(whole).encode()


@pytest.mark.parametrize("value", [LONG, DEEP, [LONG] * 9, {LONG: LONG}], ids=["long", "deep", "list", "object"])
@pytest.mark.parametrize(
    "field",
    [
        lambda v: body(name=v),
        lambda v: body(datatype=v),
        _sized,
        lambda v: body(parameters={"exit": v}),
        lambda v: body(outputs=[{"name": v}]),
    ],
    ids=["name", "datatype", "size", "exit", "output"],
)
def test_an_error_repeats_little_of_what_was_sent(field: Any, value: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse_request(field(value), header_length=None, spec=SPEC, max_rows=8)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("key", ["priority", "timeout", "deadline_ms", "slice", "exit"])
def test_what_is_nested_beyond_all_measure_is_still_a_bad_request(key: str) -> None:
    nested = b"[" * 1000 + b"]" * 1000
    text = body(parameters={key: "HERE"}).replace(b'"HERE"', nested)
    with pytest.raises(BadRequestError, match=f"^parameters.{key}: is "):
        parse_request(text, header_length=None, spec=SPEC, max_rows=8)


def test_short_values_are_shown_as_they_are() -> None:
    assert [shown(v) for v in ("INT8", None, 3, True, [1, 2])] == ["'INT8'", "None", "3", "True", "[1, 2]"]
    assert len(shown(LONG)) == 80
