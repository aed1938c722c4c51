"""``offramp prepare --task generate``: checkpoints of every format that is taken, what is refused by its field, and a
bundle whose parts pay."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stories
from safetensors.numpy import load_file, save_file
from story_bundles import MIDDLES, OPENINGS, checkpoint, prompt, write
from story_checkpoints import CONFIG, same, write_gguf, write_huggingface
from tokenizers import Tokenizer
from typer.testing import CliRunner

from offramp_cli.main import app
from offramp_core.errors import InvalidArgumentError, ModelRefusedError
from offramp_worker.generate.llama.architecture import Architecture, RotaryScaling, rotary_tables
from offramp_worker.generate.llama.manifest import PROFILE_FILE, GenerationProfile
from offramp_worker.generate.load import load_generation, read_manifest, read_profile
from offramp_worker.generate.seam import DecodingRoute
from offramp_worker.prepare.generation import pipeline
from offramp_worker.prepare.generation.huggingface import architecture_of
from offramp_worker.prepare.generation.measuring import Tally
from offramp_worker.prepare.generation.pipeline import GenerationRequest, prepare_generation
from offramp_worker.prepare.generation.report import draft_line, judged
from offramp_worker.prepare.generation.sources import read_checkpoint
from offramp_worker.prepare.progress import Reporter


def test_a_folder_of_transformers_is_the_same_model(tmp_path: Path) -> None:
    read = read_checkpoint(str(write_huggingface(tmp_path / "Stories 260K")))
    same(read, checkpoint())
    assert (read.name, read.end_tokens) == ("stories-260k", (1, 2))
    assert read.tokenizer_config == {"bos_token": "<s>", "chat_template": stories.CHAT}


def test_weights_in_several_files_are_put_together(tmp_path: Path) -> None:
    folder = write_huggingface(tmp_path / "m")
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    parts = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    for file, of in parts.items():
        save_file({n: whole[n] for n in of}, folder / file)
    index = {"weight_map": {n: file for file, of in parts.items() for n in of}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    same(read_checkpoint(str(folder)), checkpoint())
    index["weight_map"][names[0]] = "../a.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelRefusedError, match="weight_map"):
        read_checkpoint(str(folder))


def test_a_gguf_file_is_the_same_model(tmp_path: Path) -> None:
    read = read_checkpoint(str(write_gguf(tmp_path / "stories.gguf")))
    same(read, checkpoint())
    assert read.end_tokens == (2,)


def test_rotary_frequencies_are_stretched_as_llama_3_1_has_it() -> None:
    """Values of transformers' _compute_llama3_parameters, for base 500,000 and heads of 16: fast turns kept, slow ones
    divided by 8."""
    a = Architecture(
        64, 64, 1, 4, 4, 16, 512, 8192, rotary_base=500000.0, rotary_scaling=RotaryScaling(8.0, 1.0, 4.0, 8192)
    )
    plain = rotary_tables(replace(a, rotary_scaling=None))[1][1]
    stretched = rotary_tables(a)[1][1]
    ratio = np.arcsin(stretched) / np.arcsin(plain)
    turns = 8192 * 500000.0 ** (-np.arange(0, 16, 2) / 16) / (2 * np.pi)
    smooth = (turns - 1) / 3
    expected = [1.0 if t > 4 else 1 / 8 if t < 1 else (1 - s) / 8 + s for t, s in zip(turns, smooth, strict=True)]
    assert ratio == pytest.approx(expected, rel=1e-4)


T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
CONFIGS = [
    ({"model_type": "bert"}, "model_type is 'bert'.*LlamaForCausalLM"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    (T5, r"'t5', architectures \['T5ForConditionalGeneration'\]: an encoder with a decoder; .*MistralForCausalLM"),
    ({"attention_bias": True}, "attention_bias"),
    ({"hidden_act": "gelu"}, "hidden_act is gelu"),
    ({"sliding_window": 4096}, "sliding_window"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_scaling": {"type": "yarn"}}, "yarn"),
    ({"num_hidden_layers": 0}, "layers is 0"),
    ({"num_hidden_layers": "5"}, "num_hidden_layers is '5'"),
    ({"num_key_value_heads": 3}, "kv_heads, 3"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"hidden_size": 2**40}, "hidden is"),
]


@pytest.mark.parametrize(("change", "why"), CONFIGS, ids=[next(iter(c)) for c, _ in CONFIGS])
def test_a_config_that_is_not_of_the_family_is_refused_by_its_field(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelRefusedError, match=why):
        architecture_of(CONFIG | change)


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    "truncated weights": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-7]),
        "model.safetensors: cannot be read",
    ),
    "sizes of another model": (
        lambda f: (f / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 171})),
        "calls for",
    ),
    "fewer layers than weights": (
        lambda f: (f / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 4})),
        "layers.4",
    ),
    "more layers than weights": (
        lambda f: (f / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 6})),
        "layers.5.* is missing",
    ),
    "a config that is none": (lambda f: (f / "config.json").write_text("[" * 10**5), "config.json"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json cannot be read"),
    "a tokenizer that is none": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json cannot be read"),
    "a tokenizer of another model": (
        lambda f: (f / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 511})),
        "calls for",
    ),
    "no end": (lambda f: (f / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": None})), "eos_token_id"),
    "an end outside": (
        lambda f: (f / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 512})),
        "end tokens",
    ),
}


@pytest.mark.parametrize(("damage", "why"), FOLDERS.values(), ids=FOLDERS.keys())
def test_a_folder_whose_files_do_not_fit_is_refused(tmp_path: Path, damage: Callable[[Path], object], why: str) -> None:
    folder = write_huggingface(tmp_path / "m")
    damage(folder)
    with pytest.raises((ModelRefusedError, InvalidArgumentError), match=why):
        read_checkpoint(str(folder))


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    folder = write_huggingface(tmp_path / "m")
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_tokens(["more"])
    library.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelRefusedError, match="the tokenizer has 513 tokens and the model knows 512"):
        read_checkpoint(str(folder))


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.02, 0.3, 0.9, 0.999])
def test_a_truncated_gguf_file_is_refused(tmp_path: Path, keep: float) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * keep)])
    with pytest.raises(ModelRefusedError, match=r"^m\.gguf: "):
        read_checkpoint(str(file))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"architecture": "bert"}, "general.architecture is 'bert'.*'llama'"),
        ({"architecture": "t5"}, "general.architecture is 't5'.*'llama'"),
        ({"tokenizer": "t5"}, "tokenizer.ggml.model is 't5'; llama and gpt2"),
        ({"tokenizer": "gpt2", "tokenizer__ggml__pre": "klingon"}, "tokenizer.ggml.pre is 'klingon'; gpt-2, smollm"),
        ({"llama__rope__scaling__type": "yarn"}, "stretched"),
        ({"llama__expert_count": "8"}, "llama.expert_count"),
    ],
)
def test_a_gguf_file_that_is_not_of_the_family_is_refused_by_its_field(
    tmp_path: Path, fields: dict[str, Any], why: str
) -> None:
    with pytest.raises(ModelRefusedError, match=why):
        read_checkpoint(str(write_gguf(tmp_path / "m.gguf", **fields)))


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (struct.pack("<7i", 64, 172, 5, 8, 4, 512, 512) + bytes(972), "has 1000 bytes and its header calls for"),
        (b"abc", "a header of llama2.c"),
        (struct.pack("<7i", 64, 172, 5, 7, 4, 512, 512), "none of llama2.c"),
        (struct.pack("<7i", 2**30, 2**30, 2**30, 8, 4, 512, 512), "truncated"),
    ],
    ids=["truncated", "short", "heads", "huge"],
)
def test_a_file_of_llama2c_whose_bytes_do_not_fit_is_refused(tmp_path: Path, raw: bytes, why: str) -> None:
    (tmp_path / "m.bin").write_bytes(raw)
    (tmp_path / "tok.bin").write_bytes(stories.data_file("tok512.bin").read_bytes())
    with pytest.raises(ModelRefusedError, match=why):
        read_checkpoint(str(tmp_path))


def test_what_is_no_checkpoint_is_refused_with_what_is_taken(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    for uri in (str(tmp_path / "none"), str(tmp_path / "model.pt"), str(tmp_path)):
        with pytest.raises(InvalidArgumentError, match=r"config\.json"):
            read_checkpoint(uri)


# --- the whole command --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    texts = [a + b for b in MIDDLES for a in OPENINGS]
    file.write_text(
        "".join(json.dumps(text if i % 2 else {"prompt": text, "id": i}) + "\n" for i, text in enumerate(texts))
    )
    return file


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "FITTED", 4)
    monkeypatch.setattr(pipeline, "HELD_OUT", 3)
    monkeypatch.setattr(pipeline, "DRAFT_TOKENS", (2, 4))


def ask(data: Path, out: Path) -> GenerationRequest:
    return GenerationRequest(str(stories.data_file("stories260K.bin")), str(data), out, answer_tokens=24)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_bundle_is_made_that_a_worker_can_serve_and_that_says_what_was_left_out(data: Path, tmp_path: Path) -> None:
    report = prepare_generation(ask(data, tmp_path / "out"), Reporter(quiet=True))
    loaded = load_generation(tmp_path / "out", threads=1, cache_bytes=2**24)
    assert loaded.bundle.digest == report.digest
    assert [d.id for d in loaded.bundle.drafts] == list(report.kept)
    tried = {"draft int8", "draft int4", "draft ngram", "variant int8", "variant int4"}
    assert {f"draft {d}" for d in report.kept} | {
        f"variant {v.name}" for v in loaded.bundle.variants[1:]
    } == tried - report.refused.keys()
    assert all("NotWorthIt" in why for why in report.refused.values())
    assert {(d.draft, d.tokens) for d in report.drafts} == {(d, n) for d in ("int8", "int4", "ngram") for n in (2, 4)}
    assert all(d.different == 0 for d in report.drafts)
    int8 = next(v for v in report.variants if v.name == "int8")
    assert int8.agreement > 0.9
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == json.loads(json.dumps(asdict(report)))
    assert (tmp_path / "out" / "report.png").read_bytes()[:4] == b"\x89PNG"
    seconds = read_profile(tmp_path / "out" / PROFILE_FILE, GenerationProfile).variants["fp32"]
    assert {"1", "2", "4", "8"} <= seconds.keys() and loaded.bundle.variants[0].token_seconds == seconds["1"]
    assert (
        write(loaded.engine, prompt(), n=20, route=DecodingRoute()).ids == stories.greedy("Once upon a time", n=20)[0]
    )
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_what_was_interrupted_goes_on_where_it_was_and_what_was_asked_otherwise_begins_anew(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def counted(name: str) -> None:
        real = getattr(pipeline, name)
        monkeypatch.setattr(pipeline, name, lambda *a, **k: (done.append(name), real(*a, **k))[1])

    for name in ("_answers", "_choose", "_measure"):
        counted(name)
    with monkeypatch.context() as broken:
        broken.setattr(pipeline, "seconds_at_once", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare_generation(ask(data, tmp_path / "out"), Reporter(quiet=True))
    assert done == ["_answers", "_choose", "_choose"] and not (tmp_path / "out").exists()
    prepare_generation(ask(data, tmp_path / "out"), Reporter(quiet=True))
    assert done == ["_answers", "_choose", "_choose", "_measure"]
    with monkeypatch.context() as broken:
        broken.setattr(pipeline, "seconds_at_once", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        for tokens in (24, 23):
            with pytest.raises(KeyboardInterrupt):
                prepare_generation(replace(ask(data, tmp_path / "out"), answer_tokens=tokens), Reporter(quiet=True))
    assert done.count("_answers") == 3
    assert read_manifest(tmp_path / "out").name == "stories260k"  # the earlier bundle is whole all the while


def test_a_draft_pays_if_it_saves_a_twentieth_and_its_refusal_has_the_figures() -> None:
    reference = Tally(seconds=10.0, tokens=100)
    fast = Tally(seconds=9.4, tokens=100, proposed=50, accepted=40)
    slow = Tally(seconds=9.6, tokens=100, proposed=50, accepted=10)
    wrong = Tally(seconds=5.0, tokens=100, proposed=50, accepted=40, different=1)
    assert judged([draft_line("d", 2, slow, reference), draft_line("d", 4, fast, reference)]) == ""
    assert judged([draft_line("d", 2, slow, reference)]) == (
        "NotWorthIt: at its best 0.96 of fp32's time per token, more than 0.95; by draft tokens: 2: 0.20 accepted, "
        "0.96 of the time"
    )
    assert "differ" in judged([draft_line("d", 2, wrong, reference)])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 9 is no JSON"),
        ("[" * 10**5, "line 9 is no JSON"),
        ("3", "line 9 must be a text"),
        ('{"question": "?"}', "line 9 must be a text"),
        ('{"messages": [{"role": 1, "content": "x"}]}', "line 9 must be a text"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no chat template"),
        ('""', "line 9 must be a text"),
        ('"' + "x" * 2**20 + '"', "line 9 has more than"),
    ],
    ids=["broken", "nested", "number", "another field", "a role", "no template", "empty", "long"],
)
def test_a_prompt_that_cannot_be_read_is_refused_with_its_line(data: Path, tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(data.read_text().splitlines(keepends=True)[:8]) + line + "\n")
    with pytest.raises(InvalidArgumentError, match=why):
        prepare_generation(ask(file, tmp_path / "out"), Reporter(quiet=True))


def test_too_few_prompts_are_refused(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(data.read_text().splitlines(keepends=True)[0] * 20)
    with pytest.raises(InvalidArgumentError, match="1 different prompts; at least 8"):
        prepare_generation(ask(file, tmp_path / "out"), Reporter(quiet=True))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--side", "x.onnx"], "--side belongs to other tasks"),
        (["--device", "cuda"], "--device belongs to other tasks"),
        (["--variants"], "--variants belongs to other tasks"),
        (["--answer-tokens", "1"], "answer-tokens is 1"),
        (["--answer-tokens", "600"], "context has 512"),
        (["--name", "A/B"], "name 'A/B'"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_the_command_refuses_by_option(data: Path, tmp_path: Path, options: list[str], why: str) -> None:
    asked = [
        "--task",
        "generate",
        "--model",
        str(stories.data_file("stories260K.bin")),
        "--data",
        str(data),
        "--out",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(app, ["prepare", *asked, *options])
    assert result.exit_code == 2 and why in result.stderr, result.output


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("model", "why"),
    [
        (T5, "architectures ['T5ForConditionalGeneration']: an encoder with a decoder; a decoder alone is taken"),
        (
            {"model_type": "bert", "architectures": ["BertModel"]},
            "architectures ['BertModel']: a decoder alone is taken: LlamaForCausalLM, MistralForCausalLM",
        ),
    ],
    ids=["a T5", "an encoder"],
)
def test_the_command_refuses_a_model_that_is_no_decoder_by_its_architecture(
    data: Path, tmp_path: Path, model: dict[str, Any], why: str
) -> None:
    folder = write_huggingface(tmp_path / "m", **model)
    options = ["--model", str(folder), "--data", str(data), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["prepare", "--task", "generate", *options])
    assert result.exit_code == 2
    assert why in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_prints_its_report(data: Path, tmp_path: Path) -> None:
    asked = [
        "--task",
        "generate",
        "--model",
        str(stories.data_file("stories260K.bin")),
        "--data",
        str(data),
        "--out",
        str(tmp_path / "out"),
        "--answer-tokens",
        "16",
    ]
    result = CliRunner().invoke(app, ["prepare", *asked, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["digest"] == read_manifest(tmp_path / "out").digest
