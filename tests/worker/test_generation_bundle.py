"""A bundle for generation is loaded and none of it is trusted; a worker process serves it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stories
from processes import WorkerProcess, eventually
from safetensors.numpy import load_file, save_file
from story_bundles import write_story_bundle

from offramp_core.errors import DeliveryError, InvalidBundleError
from offramp_worker.fetch.fetch import _check_bundle
from offramp_worker.fetch.source import Source
from offramp_worker.generate.llama.manifest import DraftFigures, GenerationProfile
from offramp_worker.generate.load import file_entry, load_generation, read_manifest


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stories") / "bundle"
    write_story_bundle(path)
    return path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "bundle"))


def load(folder: Path) -> Any:
    return load_generation(folder, threads=1, cache_bytes=2**24)


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the manifest as a forger would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def relist(folder: Path, name: str) -> None:
    """The manifest says of a file what is there now."""
    change(folder, lambda m: m["files"].update({name: asdict(file_entry(folder / name))}))


def retensor(folder: Path, name: str, edit: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / name)
    edit(tensors)
    save_file(tensors, folder / name)
    relist(folder, name)


def test_its_digest_names_the_content_and_not_where_it_lies(whole: Path, folder: Path) -> None:
    assert read_manifest(whole).digest == read_manifest(folder).digest
    retensor(folder, "int4.safetensors", lambda t: t["head.scales"].__imul__(np.float32(1.0001)))
    assert read_manifest(whole).digest != read_manifest(folder).digest


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another version": (lambda m: m.update(schema_version=2), "schema_version is 2"),
    "a name with a slash": (lambda m: m.update(name="a/b"), "name 'a/b'"),
    "no layers": (lambda m: m["architecture"].update(layers=0), "architecture.layers is 0"),
    "layers without number": (lambda m: m["architecture"].update(layers=10**9), "architecture.layers"),
    "a context without end": (lambda m: m["architecture"].update(context_length=2**40), "architecture.context_length"),
    "heads that do not divide": (lambda m: m["architecture"].update(heads=7), "architecture.heads is 7"),
    "a rotary base of nothing": (lambda m: m["architecture"].update(rotary_base=0), "rotary_base"),
    "a scaling out of range": (
        lambda m: m["architecture"].update(
            rotary_scaling={"factor": 0, "low_frequency_factor": 1, "high_frequency_factor": 4, "original_context": 8}
        ),
        "rotary_scaling",
    ),
    "an end token outside": (lambda m: m.update(end_tokens=[512]), "end_tokens"),
    "no end token": (lambda m: m.update(end_tokens=[]), "end_tokens"),
    "no reference": (lambda m: m["variants"].pop(0), "fp32"),
    "a reference that is rounded": (lambda m: m["variants"][0].update(bits=4), "bits"),
    "three bits": (lambda m: m["variants"][1].update(bits=3), "bits"),
    "a variant elsewhere": (lambda m: m["variants"][1].update(name="../int8"), "name"),
    "a draft of nothing": (lambda m: m["drafts"].append({"id": "int2", "kind": "variant"}), "'int2'"),
    "an exit that is not there": (lambda m: m["drafts"].append({"id": "exit-2", "kind": "exit"}), "exit"),
    "a draft of no tokens": (lambda m: m["drafts"][0].update(draft_tokens=[0]), "draft_tokens of 'int8' has 0"),
    "a draft of less": (lambda m: m["drafts"][0].update(draft_tokens=[3, -5]), "draft_tokens of 'int8' has -5"),
    "a draft of many tokens": (lambda m: m["drafts"][0].update(draft_tokens=[17]), "has 17; it must be in 1..16"),
    "a length twice": (lambda m: m["drafts"][0].update(draft_tokens=[3, 3]), "each once"),
    "many lengths": (lambda m: m["drafts"][0].update(draft_tokens=list(range(1, 6))), "5 draft_tokens; at most 4"),
    "a draft twice": (lambda m: m["drafts"].append(m["drafts"][0]), "drafts"),
    "a file that is missing in it": (lambda m: m["files"].pop("probe.safetensors"), "probe.safetensors"),
    "a file outside of the folder": (
        lambda m: m["files"].update({"../secret": {"size": 1, "sha256": ""}}),
        "../secret",
    ),
    "a size that lies": (lambda m: m["files"]["int4.safetensors"].update(size=2**60), "^int4.safetensors: has"),
    "a hash that lies": (
        lambda m: m["files"]["int4.safetensors"].update(sha256="0" * 64),
        "^int4.safetensors: its SHA-256",
    ),
    "a wrong type": (lambda m: m.update(end_tokens="x"), "end_tokens"),
    "another task": (lambda m: m.update(task="translate"), "task is 'translate'"),
}


@pytest.mark.parametrize(("edit", "why"), MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_manifest_that_lies_is_refused_by_its_field(
    folder: Path, edit: Callable[[dict[str, Any]], object], why: str
) -> None:
    change(folder, edit)
    with pytest.raises(InvalidBundleError, match=why):
        load(folder)


TENSORS: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "one is missing": ("fp32.safetensors", lambda t: t.pop("layers.0.qkv"), r"lacks 'layers\.0\.qkv'"),
    "one too many": ("common.safetensors", lambda t: t.update(more=np.zeros(1, np.float32)), "unknown tensor 'more'"),
    "another shape": ("common.safetensors", lambda t: t.update(norm=np.zeros(65, np.float32)), r"norm is F32 \[65\]"),
    "another type": (
        "int4.safetensors",
        lambda t: t.update({"head.zeros": t["head.zeros"].astype(np.int8)}),
        "head.zeros is I8",
    ),
    "weights of another model": (
        "fp32.safetensors",
        lambda t: t["layers.1.down"].__imul__(-1),
        "fp32 answers with logits",
    ),
    "weights that are no numbers": (
        "int4.safetensors",
        lambda t: t["layers.0.qkv.scales"].fill(np.nan),
        "int4 answers with logits",
    ),
    "a probe without end": (
        "probe.safetensors",
        lambda t: t.update(tokens=np.ones(10**5, np.int64)),
        "tokens has the shape",
    ),
    "a probe outside": ("probe.safetensors", lambda t: t["tokens"].fill(-1), "tokens are outside"),
    "a probe that accepts all": ("probe.safetensors", lambda t: t["logits.fp32"].fill(np.inf), "no finite number"),
}


@pytest.mark.parametrize(("name", "edit", "why"), TENSORS.values(), ids=TENSORS.keys())
def test_tensors_that_do_not_fit_are_refused_with_their_file(
    folder: Path, name: str, edit: Callable[[dict[str, Any]], object], why: str
) -> None:
    retensor(folder, name, edit)
    with pytest.raises(InvalidBundleError, match=why) as refused:
        load(folder)
    assert str(refused.value).startswith((name, "probe.safetensors"))


CONTENT = {
    "tokenizer.json": b'{"model": 3}',
    "profile.json": b'{"executor": [[[',
    "int8.safetensors": b"\xff\xff\xff\xff\xff\xff\xff\x7f{}",
    "probe.safetensors": b"",
    "tokenizer_config.json": b'{"chat_template": "{% for %}"}',
}


@pytest.mark.parametrize(("name", "raw"), CONTENT.items(), ids=CONTENT.keys())
def test_a_file_of_another_format_is_refused_by_name(folder: Path, name: str, raw: bytes) -> None:
    (folder / name).write_bytes(raw)
    relist(folder, name)
    with pytest.raises(InvalidBundleError, match=f"^{name}"):
        load(folder)


def test_a_pipe_a_missing_file_or_a_truncated_one_is_refused_by_name(folder: Path) -> None:
    file = folder / "fp32.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InvalidBundleError, match=r"^fp32\.safetensors: has"):
        load(folder)
    file.unlink()
    with pytest.raises(InvalidBundleError, match=r"^fp32\.safetensors: cannot be read"):
        load(folder)
    os.mkfifo(file)
    with pytest.raises(InvalidBundleError, match=r"^fp32\.safetensors: cannot be read"):
        load(folder)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 512, "content": "<more>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    relist(folder, "tokenizer.json")
    with pytest.raises(InvalidBundleError, match=r"^tokenizer\.json: has 513 tokens; the model knows 512"):
        load(folder)


def test_a_fetched_bundle_is_checked_file_by_file_and_has_the_digest_that_is_asked_for(folder: Path) -> None:
    origin = Source("https://models.example.com/stories.tar")
    _check_bundle(folder, read_manifest(folder).digest, origin)
    with pytest.raises(DeliveryError, match="digest"):
        _check_bundle(folder, "sha256:" + "0" * 64, origin)
    (folder / "int4.safetensors").write_bytes(b"")
    with pytest.raises(DeliveryError, match=r"int4\.safetensors"):
        _check_bundle(folder, None, origin)


@pytest.mark.slow
def test_a_worker_process_serves_it_by_the_route_of_its_settings(folder: Path) -> None:
    words = "Once upon a time"
    expected = stories.greedy(words, n=16)[1]
    with WorkerProcess(folder, control_plane=False, env={"OFFRAMP_ROUTE": "fp32+int4:3"}) as worker:
        body = {"model": "stories", "prompt": words, "max_tokens": 16, "temperature": 0}
        reply = worker.public.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["text"] == expected
        assert worker.public.get("/v1/models").json()["data"][0]["id"] == "stories"
    assert worker.process.returncode == 0


@pytest.mark.slow
def test_a_worker_process_with_a_broken_one_stays_up_and_says_why(folder: Path) -> None:
    (folder / "int4.safetensors").write_bytes(b"")
    with WorkerProcess(folder, wait_ready=False) as worker:
        refused = eventually(lambda: worker.events("bundle-refused"), what="the refusal")
        assert "int4.safetensors: has 0 bytes" in refused[0]["reason"]
        assert not worker.is_ready()


def test_of_what_its_maker_measured_of_drafts_only_that_is_believed_which_makes_sense(whole: Path) -> None:
    ratios = {
        "2": 0.7,
        "3": float("nan"),
        "4": 0.0,
        "5": -1.0,
        "6": float("inf"),
        "1": 1e-300,
        "9": 1e300,
        "7": 0.5,
        "8": 0.6,
        "many": 0.4,
    }
    figures = {n: DraftFigures(0.9, ratio) for n, ratio in ratios.items()}
    profile = GenerationProfile("cpu", 1, {}, {"int8": figures, "of another bundle": figures})
    bundle = read_manifest(whole).bundle(profile)
    assert bundle.draft_ratios == {("int8", 2): 0.7, ("int8", 7): 0.5, ("int8", 8): 0.6}
    worth = {draft.id: draft.draft_tokens for draft in bundle.drafts}
    assert worth == {"int8": (7, 8), "int4": (), "ngram": ()}, "the best two are worth trials"
