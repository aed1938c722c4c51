"""Blocks of code in the documentation: manifests are linted, Python runs, and commands exist with every option they are
given."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "worker")]

import bundles  # type: ignore[import-not-found]  # noqa: E402
from blocks import ROOT, Block, blocks, blocks_of, commands  # noqa: E402
from programs import Program, known_names, unknown_kinds  # noqa: E402

from offramp_cli.daytwo.lint import lint_text  # noqa: E402
from offramp_cli.main import app  # noqa: E402

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
VALUES_SCHEMA = json.loads((ROOT / "helm" / "offramp" / "values.schema.json").read_text())
VALUES = yaml.safe_load((ROOT / "helm" / "offramp" / "values.yaml").read_text())


def named(found: list[Block]) -> Any:
    return pytest.mark.parametrize("block", found, ids=[b.where for b in found])


@functools.cache
def targets() -> set[str]:
    """Targets of the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


# Programs of others that a reader is told to run.
FOREIGN = {"ctr", "curl", "docker", "jq", "kubectl", "pipx", "python", "python3", "skopeo"}
FOREIGN |= {
    "cat",
    "done",
    "do",
    "eval",
    "export",
    "for",
    "grep",
    "head",
    "kill",
    "ls",
    "mkdir",
    "rm",
    "sed",
    "sha256sum",
    "tail",
    "tar",
}

# --- YAML --------------------------------------------------------------------------------------------


@named(blocks("yaml"))
def test_manifests_and_values_in_the_documentation_are_accepted(block: Block) -> None:
    if "values.yaml" in block.options:
        jsonschema.validate(yaml.safe_load(block.text), _partial(VALUES_SCHEMA))
        return
    if re.search(r"^kind:", block.text, re.MULTILINE):
        assert lint_text(block.text, block.where)[0] == []
    assert list(yaml.safe_load_all(block.text)), f"{block.where} is empty"


def _partial(schema: Any) -> Any:
    """The chart's schema for a file that overrides some values: nothing is required."""
    if isinstance(schema, dict):
        return {k: _partial(v) for k, v in schema.items() if k != "required" or not isinstance(v, list)}
    return schema


def test_a_manifest_with_a_wrong_field_would_be_noticed() -> None:
    text = (
        "```yaml\napiVersion: earlyexit.dev/v1alpha1\nkind: EarlyExitService\nmetadata: {name: a}\nspec: {modle: "
        "{}}\n```\n"
    )
    (block,) = blocks_of(text, "x.md")
    assert lint_text(block.text, "x.md")[0]


# --- Python ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader would stand in: the bundle is in ``bundle``."""
    here = tmp_path_factory.mktemp("reader")
    bundles.write_bundle(here / "bundle")
    return here


@named([b for b in blocks("python") if not b.note.startswith("not run:")])
def test_python_in_the_documentation_runs(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block.text, block.where, "exec"), {"__name__": "__main__"})
    assert out.getvalue() or "print" not in block.text


# --- commands ----------------------------------------------------------------------------------------


@named(blocks("sh", "console"))
def test_commands_in_the_documentation_exist_with_their_options(block: Block) -> None:
    for command in commands(block.text):
        wrong = problem(command)
        assert not wrong, f"{block.where}: {command}: {wrong}"


def problem(command: str) -> str:
    """Why a command cannot be meant; empty where it can. Programs of others are only known by name here."""
    words = words_of(command)
    if not words or re.match(r"\w+=", words[0]):
        return ""
    head, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if words[:2] == ["kubectl", "offramp"]:
        head, rest = "offramp", words[2:]
    if head in ("python", "python3") and rest[:1] == ["-m"]:
        head, rest = "-m", rest[1:]
    kind = re.sub(r"^(cluster|images|scripts)/.*", "file", head)
    known = {"offramp": _offramp, "make": _make, "helm": _helm, "-m": _module}
    if kind == "file":
        return "" if (ROOT / head).exists() else "no such file"
    if kind in known:
        return known[kind](rest)
    return "" if head in FOREIGN or (ROOT / ".venv/bin" / head).exists() else f"no program {head}"


def words_of(command: str) -> list[str]:
    try:
        return shlex.split(command.replace("$(", "(").replace("…", "x"))
    except ValueError:
        return []  # a part of a quoted script


def _make(words: list[str]) -> str:
    unknown = set(words) - targets()
    return f"no target {', '.join(sorted(unknown))}" if unknown else ""


def _offramp(words: list[str]) -> str:
    if not words:
        return ""
    if words[0].startswith("-"):
        return "" if words[0] in ("--install-completion", "--help", "--version") else f"no option {words[0]}"
    command = COMMANDS.get(words[0])
    if command is None:
        return "" if words[0].isupper() else f"no command {words[0]}"
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    unknown = [w for w in words[1:] if w.startswith("-") and w != "-" and w.split("=")[0] not in known]
    return f"no option {', '.join(unknown)}" if unknown else ""


def _helm(words: list[str]) -> str:
    given = [words[i + 1] for i, w in enumerate(words[:-1]) if w == "--set"]
    wrong = [
        path for part in given for path in (p.split("=")[0] for p in re.split(r",(?![^{]*})", part)) if not _value(path)
    ]
    return f"no value {', '.join(wrong)}" if wrong else ""


def _value(path: str) -> bool:
    at: Any = VALUES
    for name in path.split("."):
        if not isinstance(at, dict) or name not in at:
            return False
        at = at[name]
    return True


def _module(words: list[str]) -> str:
    module = words[0]
    if not module.startswith(("bench", "website")):
        return ""
    path = ROOT / module.replace(".", "/")
    source = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    if not source.exists():
        return "no such module"
    # Its own words instead of its --help: some import torch before they say anything.
    text = source.read_text(encoding="utf-8")
    missing = [w for w in words[1:] if w.startswith("--") and f'"{w.split("=")[0]}"' not in text]
    return f"no option {', '.join(missing)}" if missing else ""


@pytest.mark.parametrize(
    "command",
    [
        "offramp stats digits",
        "kubectl offramp why --wiat",
        "make evrything",
        "helm install a b --set image.tga=1",
        "images/biuld worker x",
        "kubctl get pods",
    ],
)
def test_a_command_that_does_not_exist_would_be_noticed(command: str) -> None:
    assert problem(command)


# --- programs of others --------------------------------------------------------------------------------


@functools.cache
def programs() -> dict[str, Program]:
    """kubectl and Helm as the cluster of the tests has them."""
    built = subprocess.run([ROOT / "cluster" / "build", "kubectl", "helm"], check=True, capture_output=True, text=True)
    folder = Path(built.stdout.strip())
    return {"kubectl": Program(folder / "kubectl", "options"), "helm": Program(folder / "helm")}


def foreign_problem(command: str) -> str:
    """Why a command line of kubectl or Helm cannot be meant."""
    words = words_of(re.sub(r"^\w+=\$\((.*)\)$", r"\1", command))
    if not words or words[0] not in ("kubectl", "helm") or words[:2] == ["kubectl", "offramp"]:
        return ""
    wrong, chain, rest = programs()[words[0]].problem(words[1:])
    strange = unknown_kinds(chain, rest) if words[0] == "kubectl" else []
    absent = [name for name in re.findall(r"earlyexit\.dev/[a-z-]+", command) if name not in known_names()]
    return wrong or ", ".join([*(f"no kind {kind}" for kind in strange), *(f"no name {name}" for name in absent)])


@pytest.mark.slow  # needs the cluster's programs, which are built once
def test_commands_of_kubectl_and_helm_in_the_documentation_exist_with_their_options_and_kinds() -> None:
    found = [(block.where, command) for block in blocks("sh", "console") for command in commands(block.text)]
    wrong = [f"{where}: {command}: {why}" for where, command in found if (why := foreign_problem(command))]
    assert wrong == []
    assert sum(command.startswith("kubectl ") for _, command in found) > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("kubectl gte pods", "no command gte"),
        ("kubectl get pods --watchh", "no option --watchh"),
        ("kubectl -n somewhere get pods -q", "no option -q"),
        ("kubectl get eess", "no kind eess"),
        ("kubectl get pods,rampconfgs", "no kind rampconfgs"),
        ("kubectl describe pods -l earlyexit.dev/servce=digits", "no name earlyexit.dev/servce"),
        ("kubectl rollout status deployment/offramp --timeout=3m", ""),
        ("leader=$(kubectl get lease offramp-leader -o jsonpath='{.spec}')", ""),
        ("helm instal offramp helm/offramp", "no command instal"),
        ("helm install offramp helm/offramp --create-namespaces", "no option --create-namespaces"),
        ("helm upgrade --install offramp helm/offramp -f values.yaml --wait --timeout 3m", ""),
    ],
)
def test_a_slip_in_a_command_of_kubectl_or_helm_would_be_noticed(command: str, why: str) -> None:
    assert foreign_problem(command) == why


@named(blocks("sh"))
def test_shell_in_the_documentation_can_be_parsed(block: Block) -> None:
    answer = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
