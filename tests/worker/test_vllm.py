"""A worker before vLLM, against what the real one said once (``python -m bench.vllm.record``): a process per
configuration, over its socket."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.vllm.record import CONFIGURATIONS, PROMPTS, RECORDING, TOKENS, python_that, request
from bench.vllm.replay import read
from bench.vllm.tiny import write_checkpoint
from processes import WorkerProcess, document, eventually

from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_core.plan import Plan
from offramp_core.protocol import ArmCounts
from offramp_worker.generate.vllm.command import Room, command, environment
from offramp_worker.generate.vllm.load import VllmSettings, check_vllm, find_vllm, load_vllm, model_of
from offramp_worker.prepare.generation.vllm import VllmReport, prepare_vllm
from offramp_worker.prepare.progress import Reporter

pytestmark = pytest.mark.slow  # each configuration is a process

QUIET = Reporter(quiet=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, VllmReport]:
    """A folder with the bundle that `prepare` writes, the program that takes vLLM's place, and the report."""
    folder = tmp_path_factory.mktemp("vllm")
    python = python_that(folder, "play", str(RECORDING))
    report = prepare_vllm(request(folder), QUIET, settings=VllmSettings(python=python))
    return folder, Path(python), report


@pytest.fixture(scope="module")
def worker(made: tuple[Path, Path, VllmReport]) -> Iterator[WorkerProcess]:
    folder, python, _ = made
    with WorkerProcess(folder / "bundle", env={"OFFRAMP_VLLM_PYTHON": str(python), "OFFRAMP_OUTPUT": "TokenF1"}) as one:
        yield one


def plan(worker: WorkerProcess, precision: str) -> Plan:
    state = worker.state()
    return Plan.from_mapping(
        {
            "backboneDigest": state.backbone_digest,
            "rampSetDigest": state.ramp_set_digest,
            "ramps": [],
            "precision": precision,
        }
    )


def run(worker: WorkerProcess, precision: str, **fields: Any) -> None:
    stable = plan(worker, precision)
    if "canary" in fields:
        fields["canary"] = plan(worker, fields["canary"])
    fields = {"epoch": worker.state().epoch + 1, "accuracy_budget": 0.99, "audit_rate": 1.0, **fields}
    reply = worker.deliver(document(stable, **fields))
    assert reply.status_code == 200, reply.text


def ask(worker: WorkerProcess, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, **fields}
    return worker.public.post("/v1/completions", json=body)


def counts(worker: WorkerProcess, arm: str) -> ArmCounts:
    epoch = worker.state().epoch
    return next(c for c in worker.observations().counts if c.arm == arm and c.epoch == epoch)


def audited(worker: WorkerProcess, arm: str, n: int) -> ArmCounts:
    eventually(lambda: counts(worker, arm).audited >= n, what=f"{n} audits of {arm}")
    return counts(worker, arm)


def recorded(dtype: str, prompt: str) -> tuple[list[int], str]:
    """The tokens that vLLM wrote to this prompt in the configuration without a draft, and why it ended."""
    for key, lines in read(RECORDING)[json.dumps([dtype, None, {}])]["streams"].items():
        body = json.loads(key)
        if body.get("stream") and not body["temperature"] and "logprobs" not in body and said(body["prompt"]) == prompt:
            choices = [json.loads(line[5:])["choices"][0] for line in lines if line.startswith("data: {")]
            return [token for choice in choices for token in choice["token_ids"]], choices[-1]["finish_reason"]
    raise AssertionError(f"{prompt!r} was never recorded")


def recorded_text(dtype: str, prompt: str) -> str:
    return said(recorded(dtype, prompt)[0])


def said(tokens: list[int]) -> str:
    """Tokens of the tiny checkpoint as text: one for each byte."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = [b for b in range(256) if b in (*range(33, 127), *range(161, 173), *range(174, 256))]
    others = [b for b in range(256) if b not in known]
    of = {chr(b): b for b in known} | {chr(256 + i): b for i, b in enumerate(others)}
    return bytes(of[letters[t]] for t in tokens if t < 256).decode(errors="replace")


@contextmanager
def that_does_not_start(python: Path) -> Iterator[None]:
    """Meanwhile what has ended stays away."""
    aside = python.rename(python.with_name("aside"))
    try:
        yield
    finally:
        aside.rename(python)


def pids(worker: WorkerProcess, configuration: str) -> int:
    started = eventually(
        lambda: [e for e in worker.events("vllm-started") if e["configuration"] == configuration],
        what=f"the log's line of {configuration}",
    )
    return int(started[-1]["pid"])


def test_prepare_starts_each_configuration_and_says_what_it_takes_and_loses(
    made: tuple[Path, Path, VllmReport],
) -> None:
    folder, _, report = made
    assert report.vllm == "0.32.0"
    by_name = {line.name: line for line in report.configurations}
    assert by_name.keys() == {"ngram", "bf16"}
    draft = by_name["ngram"]
    assert (draft.different, draft.loss["TokenF1"]) == (0, 0.0), "a draft changes no answer"
    assert by_name["bf16"].equal < report.prompts, "rounded numbers do"
    assert check_vllm(folder / "bundle").digest == report.digest


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_answers_are_vllms_tokens_in_our_protocol_whole_and_as_a_stream(reason: str, worker: WorkerProcess) -> None:
    run(worker, "fp32")
    prompt = next(prompt for prompt in PROMPTS if recorded("float32", prompt)[1] == reason)
    tokens, _ = recorded("float32", prompt)
    whole = ask(worker, prompt).json()
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (said(tokens), reason)
    assert (whole["offramp"]["route"], whole["usage"]["completion_tokens"]) == ("fp32", len(tokens))
    lines = ask(worker, prompt, stream=True).text.splitlines()
    pieces = [one for line in lines if line.startswith("data: {") for one in json.loads(line[6:])["choices"]]
    assert "".join(piece["text"] for piece in pieces) == said(tokens)
    assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [reason]


def test_a_plan_says_which_process_answers_and_audits_ask_the_reference(worker: WorkerProcess) -> None:
    run(worker, "ngram")
    replies = [ask(worker, prompt).json() for prompt in PROMPTS]
    assert {r["offramp"]["route"] for r in replies} == {"ngram"}
    assert [r["choices"][0]["text"] for r in replies] == [recorded_text("float32", prompt) for prompt in PROMPTS]
    seen = audited(worker, "stable", len(PROMPTS))
    assert seen.disagreements == 0
    run(worker, "bf16")
    replies = [ask(worker, prompt).json() for prompt in PROMPTS]
    assert [r["choices"][0]["text"] for r in replies] == [recorded_text("bfloat16", prompt) for prompt in PROMPTS]
    assert audited(worker, "stable", len(PROMPTS)).disagreements > 0


def test_a_canary_has_exactly_its_requests_and_its_process_alone_answers_them(worker: WorkerProcess) -> None:
    run(worker, "fp32", canary="ngram", weight=50)
    replies = [ask(worker, prompt).json() for prompt in PROMPTS]
    of_canary = [r for r in replies if r["offramp"]["arm"] == "canary"]
    assert 0 < len(of_canary) < len(replies)
    assert {r["offramp"]["route"] for r in of_canary} == {"ngram"}
    assert counts(worker, "canary").requests == len(of_canary)
    assert counts(worker, "stable").requests == len(replies) - len(of_canary)


def test_sampled_answers_get_no_lossy_configuration(worker: WorkerProcess) -> None:
    run(worker, "bf16")
    reply = ask(worker, PROMPTS[0], temperature=0.8, top_p=0.9, seed=5).json()
    assert reply["offramp"]["route"] == "fp32"


def test_while_the_references_process_is_away_requests_are_refused_with_when_to_come_again(
    made: tuple[Path, Path, VllmReport], worker: WorkerProcess
) -> None:
    run(worker, "fp32")
    with that_does_not_start(made[1]):
        os.kill(_child_of(pids(worker, "fp32")), signal.SIGKILL)
        eventually(lambda: not worker.is_ready(), what="the end of its readiness")
        refused = ask(worker, PROMPTS[0])
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "fp32" in refused.text
    eventually(worker.is_ready, what="readiness after a restart")
    assert ask(worker, PROMPTS[0]).json()["choices"][0]["text"] == recorded_text("float32", PROMPTS[0])


def test_while_another_process_is_away_the_reference_answers_in_its_place(
    made: tuple[Path, Path, VllmReport], worker: WorkerProcess
) -> None:
    run(worker, "ngram")
    assert ask(worker, PROMPTS[0]).json()["offramp"]["route"] == "ngram"
    keeper = pids(worker, "ngram")
    child = _child_of(keeper)
    with that_does_not_start(made[1]):
        os.kill(keeper, signal.SIGKILL)
        eventually(lambda: not _lives(child), what="the end of what a killed keeper had started")
        eventually(  # at first with an error, until the worker has seen the end: it does not wait for the process
            lambda: ask(worker, PROMPTS[0]).json().get("offramp", {}).get("route") == "fp32",
            what="the reference's turn",
        )
        assert ask(worker, PROMPTS[0]).json()["choices"][0]["text"] == recorded_text("float32", PROMPTS[0])
    eventually(lambda: ask(worker, PROMPTS[0]).json()["offramp"]["route"] == "ngram", what="its return")


@contextmanager
def away(python: Path, worker: WorkerProcess, variant: str) -> Iterator[None]:
    """Meanwhile this variant's process is away, and the worker knows."""
    assert worker.state().message.find(f"{variant} is away") < 0
    with that_does_not_start(python):
        os.kill(_child_of(pids(worker, variant)), signal.SIGKILL)
        eventually(lambda: f"{variant} is away" in worker.state().message, what="word of its absence")
        yield
    eventually(lambda: f"{variant} is away" not in worker.state().message, what="its return")


def test_answers_in_the_place_of_a_canary_that_is_away_are_its_failures_and_no_evidence_for_it(
    made: tuple[Path, Path, VllmReport], worker: WorkerProcess
) -> None:
    run(worker, "ngram", canary="bf16", weight=50)
    with away(made[1], worker, "bf16"):
        replies = [ask(worker, prompt).json() for prompt in PROMPTS]
        assert [r["choices"][0]["text"] for r in replies] == [recorded_text("float32", prompt) for prompt in PROMPTS]
        of_canary = [r for r in replies if r["offramp"]["arm"] == "canary"]
        assert {r["offramp"]["route"] for r in of_canary} == {"fp32"}
        # The other arm's evidence does not wait for it.
        audited(worker, "stable", len(replies) - len(of_canary))
        seen = counts(worker, "canary")
        assert (seen.batches, seen.failed_batches) == (len(of_canary), len(of_canary))
        assert (seen.requests, seen.drawn, seen.audited) == (0, 0, 0)
        assert not (seen.first_token or seen.per_token or seen.execution or seen.latency or seen.busy_seconds)
        assert counts(worker, "stable").failed_batches == 0


def test_no_process_outlives_a_worker_that_was_killed_and_none_has_its_secrets(
    made: tuple[Path, Path, VllmReport],
    tmp_path: Path,
) -> None:
    folder, python, _ = made
    secret = {"OFFRAMP_VLLM_PYTHON": str(python), "AWS_SECRET_ACCESS_KEY": "s", "VLLM_API_KEY": "k", "MY_TOKEN": "t"}
    worker = WorkerProcess(folder / "bundle", env={**secret, "TMPDIR": str(tmp_path)})
    worker.__enter__()
    keepers = [pids(worker, name) for name in ("fp32", "ngram", "bf16")]
    children = [_child_of(keeper) for keeper in keepers]
    for child in (*keepers, *children):
        names = {entry.split("=")[0] for entry in Path(f"/proc/{child}/environ").read_text().split("\0") if entry}
        assert not names & {*secret, "OFFRAMP_TOKEN_SHA256", "OFFRAMP_PUBLIC_KEY"}, names
    worker.process.kill()
    worker.process.wait()
    eventually(lambda: not any(_lives(child) for child in (*keepers, *children)), what="the end of all processes")
    assert not list(tmp_path.glob("offramp-vllm-*")), "the folder of their sockets is gone as well"


def test_a_worker_that_is_told_to_end_while_vllm_starts_ends_at_once(
    made: tuple[Path, Path, VllmReport], tmp_path: Path
) -> None:
    folder, _, _ = made
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\ntouch {tmp_path}/started\nexec sleep 600\n')
    slow.chmod(0o755)
    with WorkerProcess(folder / "bundle", env={"OFFRAMP_VLLM_PYTHON": str(slow)}, wait_ready=False) as worker:
        eventually((tmp_path / "started").exists, what="the start of vLLM")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(30) == 0
    assert not worker.events("bundle-refused"), "nothing is wrong with the bundle"


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_vllm_needs_of_the_environment_is_named_and_nothing_else_goes_there() -> None:
    env = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "HF_TOKEN": "x", "VLLM_API_KEY": "y", "KUBECONFIG": "z"}
    assert environment(env).keys() & env.keys() == {"PATH", "CUDA_VISIBLE_DEVICES"}
    assert environment(env)["HF_HUB_OFFLINE"] == "1"


def test_a_process_starts_on_a_gpu_that_the_others_have_nearly_filled(made: tuple[Path, Path, VllmReport]) -> None:
    manifest = check_vllm(made[0] / "bundle")
    for one in manifest.configurations:
        options = command(manifest, one, Room(made[0] / "bundle", Path("at"), 2**30, 8))
        assert float(options[options.index("--gpu-memory-utilization") + 1]) <= 0.01
        assert int(options[options.index("--kv-cache-memory-bytes") + 1]) == 2**30, "which alone says what it takes"


# --- bad input -------------------------------------------------------------------------------------


def asked(folder: Path, **fields: Any) -> dict[str, Any]:
    """The tests' configurations, the second one with these fields."""
    first, second, *_ = CONFIGURATIONS["configurations"]
    return {**CONFIGURATIONS, "configurations": [first, {**second, **fields}]}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"dtype": "float8"}, "float8"),
        ({"name": "n-gram"}, "lower-case letters and digits"),
        ({"name": "fp32"}, "names of their own"),
        ({"draft": {"kind": "eagle", "tokens": 3}}, "eagle"),
        ({"draft": {"kind": "ngram", "tokens": 0}}, "draft.tokens is 0; it must be in 1..16"),
        ({"draft": {"kind": "ngram", "tokens": 3, "width": 2}}, "draft.width is unknown"),
        ({"draft": {"kind": "ngram", "tokens": 3, "by_batch_size": [[1, 4, 3], [6, 9, 0]]}}, "without a gap"),
        ({"draft": {"kind": "model", "tokens": 3}}, "draft.model is ''"),
        ({"draft": {"kind": "model", "tokens": 3, "model": "nowhere"}}, "there is no folder"),
        ({"model": "empty"}, "it has no config.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_configuration_that_cannot_be_is_refused_with_its_field(
    fields: dict[str, Any], told: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    given = replace(request(tmp_path), asked=asked(tmp_path, **fields))
    with pytest.raises(InvalidArgumentError) as refused:
        prepare_vllm(given, QUIET, settings=VllmSettings(python="nobody starts this"))
    assert told in str(refused.value)
    assert not (tmp_path / "bundle").exists()
    assert not list(tmp_path.glob(".bundle-*"))


def test_a_draft_with_another_tokenizer_is_refused_with_what_to_do(tmp_path: Path) -> None:
    given = replace(request(tmp_path), asked=asked(tmp_path, draft={"kind": "model", "tokens": 3, "model": "other"}))
    write_checkpoint(tmp_path / "other")
    tokenizer = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidBundleError, match=r"other/tokenizer\.json: is another tokenizer .* same family"):
        prepare_vllm(given, QUIET, settings=VllmSettings(python="nobody starts this"))


def test_a_reference_with_a_draft_is_refused(tmp_path: Path) -> None:
    first = {**CONFIGURATIONS["configurations"][0], "draft": {"kind": "ngram", "tokens": 3}}
    given = replace(request(tmp_path), asked={**CONFIGURATIONS, "configurations": [first]})
    with pytest.raises(InvalidArgumentError, match="the reference is what others are compared with"):
        prepare_vllm(given, QUIET, settings=VllmSettings(python="nobody starts this"))


@pytest.mark.parametrize("python", [sys.executable, "/no/such/python"])
def test_a_python_without_vllm_is_refused_with_what_to_set(python: str) -> None:
    with pytest.raises(InvalidBundleError) as refused:
        find_vllm(python)
    assert "OFFRAMP_VLLM_PYTHON" in refused.value.remedy
    assert python in str(refused.value)


def serve_once(bundle: Path, python: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "offramp_cli", "serve", str(bundle), "--port", "0"],
        env={**os.environ, "OFFRAMP_VLLM_PYTHON": python},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return next(line for line in done.stderr.splitlines() if line.startswith("error: "))


def test_a_vllm_that_is_too_old_is_named_with_its_version(
    made: tuple[Path, Path, VllmReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    python = python_that(tmp_path, "play", str(RECORDING), "--version", "0.9.1")
    with pytest.raises(InvalidBundleError, match=r"vLLM is 0\.9\.1; at least 0\.32 is needed"):
        load_vllm(made[0] / "bundle", threads=1, cache_bytes=2**28, settings=VllmSettings(python=python))
    assert not list(tmp_path.glob("offramp-vllm-*")), "a folder was left behind"


def test_what_vllm_says_when_it_ends_is_passed_on_with_the_configuration_and_nobody_waits_for_the_others(
    made: tuple[Path, Path, VllmReport], tmp_path: Path
) -> None:
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\n[ $1 = -c ] && exit 0\n"
        'case "$*" in *speculative*) echo "ValueError: no kernel for this" >&2; exit 1;; esac\nexec sleep 600\n'
    )
    script.chmod(0o755)
    told = serve_once(made[0] / "bundle", str(script))
    assert "'ngram': vLLM ended with 1: ValueError: no kernel for this" in told


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        ({"engine": "sglang"}, "engine"),
        ({"context_length": 4}, "context_length is 4"),
        ({"files": {}}, "files does not list"),
    ],
)
def test_a_bundle_that_somebody_changed_is_refused_with_its_field(
    edit: dict[str, Any], told: str, made: tuple[Path, Path, VllmReport], tmp_path: Path
) -> None:
    shutil.copytree(made[0] / "bundle", tmp_path / "bundle")
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    (tmp_path / "bundle" / "manifest.json").write_text(json.dumps(manifest | edit))
    with pytest.raises(InvalidBundleError, match=told):
        check_vllm(tmp_path / "bundle")


def test_a_link_in_a_bundle_is_refused_for_nobody_looks_behind_it(
    made: tuple[Path, Path, VllmReport], tmp_path: Path
) -> None:
    shutil.copytree(made[0] / "bundle", tmp_path / "bundle")
    model = tmp_path / "bundle" / "models" / "tiny"
    (model.rename(tmp_path / "elsewhere") / "modeling.py").write_text("")
    model.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidBundleError, match=r"models/tiny: is a link"):
        check_vllm(tmp_path / "bundle")


def test_a_checkpoint_that_names_another_model_is_refused(made: tuple[Path, Path, VllmReport], tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    shutil.copytree(made[0] / "bundle" / "models" / "tiny", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"speculators_config": {"verifier": {}}}))
    with pytest.raises(InvalidBundleError, match=r"models/tiny/config\.json: speculators_config"):
        model_of(model)


@pytest.mark.parametrize("quantization", ["--trust-remote-code", "-q", "FP8", "fp8 x"])
def test_a_quantization_that_is_an_option_or_no_name_is_refused(
    quantization: str, made: tuple[Path, Path, VllmReport], tmp_path: Path
) -> None:
    shutil.copytree(made[0] / "bundle", tmp_path / "bundle")
    file = tmp_path / "bundle" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["configurations"][1]["quantization"] = quantization
    file.write_text(json.dumps(manifest))
    with pytest.raises(InvalidBundleError, match="quantization"):
        check_vllm(tmp_path / "bundle")


def test_weights_are_compared_and_neither_code_nor_what_nobody_listed_is_taken(
    made: tuple[Path, Path, VllmReport], tmp_path: Path
) -> None:
    shutil.copytree(made[0] / "bundle", tmp_path / "bundle")
    weights = tmp_path / "bundle" / "models" / "tiny" / "model.safetensors"
    shutil.copyfile(weights, weights.with_name("more.safetensors"))
    with pytest.raises(InvalidBundleError, match=r"models/tiny/more\.safetensors: manifest\.json does not list it"):
        check_vllm(tmp_path / "bundle")
    weights.with_name("more.safetensors").unlink()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(InvalidBundleError, match=r"models/tiny/model\.safetensors: its SHA-256"):
        check_vllm(tmp_path / "bundle")
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    manifest["files"]["models/tiny/modeling.py"] = manifest["files"]["profile.json"]
    (tmp_path / "bundle" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InvalidBundleError, match=r"modeling\.py"):
        check_vllm(tmp_path / "bundle")
