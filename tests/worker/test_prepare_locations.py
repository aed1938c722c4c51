"""Where ``offramp prepare`` takes models and data from: plain paths and ``file://`` URIs of this machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_prepare_refusals import ROWS, classifier

from offramp_core.errors import InvalidArgumentError
from offramp_worker.prepare.source.data import load_inputs
from offramp_worker.prepare.source.locations import local_path, model_file
from offramp_worker.prepare.source.sources import load_backbone
from offramp_worker.prepare.source.texts import find_tokenizer


@pytest.mark.parametrize("host", ["", "localhost", "LOCALHOST"])
def test_data_and_models_are_read_from_file_uris_with_their_escapes(host: str, tmp_path: Path) -> None:
    folder = tmp_path / "50% off, née"
    folder.mkdir()
    np.savez(folder / "d.npz", x=ROWS)
    classifier(folder / "my model.onnx")
    start = f"file://{host}{tmp_path.as_posix()}/50%25%20off,%20n%C3%A9e"
    np.testing.assert_array_equal(load_inputs(f"{start}/d.npz"), ROWS)
    assert load_backbone(f"{start}/my%20model.onnx", ROWS).name == "my model"


def test_a_plain_path_means_what_it_says_whatever_its_letters(tmp_path: Path) -> None:
    assert local_path(f"{tmp_path}/50%25 off#2?.npz", field="data") == tmp_path / "50%25 off#2?.npz"
    assert local_path("C:weights", field="model") == Path("C:weights")


@pytest.mark.parametrize("start", ["", "file://"])
def test_the_tokenizer_beside_a_model_is_found_whichever_way_the_model_is_named(start: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for uri in (f"{start}{tmp_path}/m.onnx", f"family:bert?heads=3&weights={start}{tmp_path}/w.safetensors"):
        assert find_tokenizer(uri, "") == tmp_path / "tokenizer.json"
    assert find_tokenizer("m.onnx", f"{start}{tmp_path}/tokenizer.json") == tmp_path / "tokenizer.json"


def test_the_file_of_a_family_is_its_weights() -> None:
    assert model_file("family:bert?weights=file:///a%20b/w.safetensors&heads=3") == Path("/a b/w.safetensors")


ELSEWHERE = {
    "an object store": ("s3://bucket/m.onnx", "takes no s3 URI"),
    "the web": ("https://models.example/m.onnx", "takes no https URI"),
    "another machine": ("file://server/m.onnx", "names the host 'server'"),
    "a relative path that reads like a host": ("file://m.onnx", "names the host 'm.onnx'"),
    "a path without its first slash": ("file:m.onnx", "has no absolute path"),
    "no path": ("file://", "has no absolute path"),
    "a query": ("file:///m.onnx?version=2", "write %3F and %23 for"),
    "a zero byte": ("file:///m%00.onnx", "holds a zero byte"),
    "no URI at all": ("file://[/m.onnx", "is not a valid URI"),
}


@pytest.mark.parametrize("field", ["model", "data"])
@pytest.mark.parametrize("case", ELSEWHERE)
def test_what_lies_elsewhere_is_refused_with_what_is_taken(case: str, field: str) -> None:
    uri, message = ELSEWHERE[case]
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        _ = load_backbone(uri, ROWS) if field == "model" else load_inputs(uri)
    assert str(caught.value).startswith(f"{field} {uri}")
    assert "file:///PATH" in str(caught.value)
    assert "\n" not in str(caught.value)
