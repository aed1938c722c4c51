"""Command lines of other people's programs, judged by the programs' own help: subcommands, options and kinds of
objects."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from blocks import ROOT

OPTION = re.compile(r"^ +(?:(-\w), )?(--[\w-]+)(?:=([^\n]*):|( [\w\[\]=\"]+)? {2,}|$)", re.MULTILINE)
# What of Kubernetes' own the documentation speaks of, beside the project's kinds.
KINDS = {
    f"{kind}{s}"
    for s in ("", "s")
    for kind in (
        "configmap",
        "crd",
        "deployment",
        "event",
        "horizontalpodautoscaler",
        "hpa",
        "httproute",
        "job",
        "lease",
        "limitrange",
        "namespace",
        "node",
        "pod",
        "poddisruptionbudget",
        "pvc",
        "resourcequota",
        "secret",
        "service",
    )
} | {"networkpolicy", "runtimeclass"}
ABOUT_KINDS = {
    "annotate",
    "delete",
    "describe",
    "edit",
    "get",
    "label",
    "patch",
    "port-forward",
    "scale",
    "top",
    "wait",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What the help of a (sub)command says. ``valued`` are options that take a word of their own."""

    commands: frozenset[str]
    options: frozenset[str]
    valued: frozenset[str]


class Program:
    """One program at ``path`` that answers ``--help``, and ``inherited`` if its options for every command stand
    elsewhere."""

    def __init__(self, path: Path, *inherited: str) -> None:
        self._path, self._inherited = path, inherited
        self.usage = functools.cache(self._usage)

    def _usage(self, *words: str) -> Usage:
        text = self._said(*words, "--help") + (self._said(*self._inherited) if self._inherited else "")
        commands = {
            name
            for part in re.findall(r"Commands[^\n]*:\n((?:  .*\n)+)", text)
            for name in re.findall(r"^  ([a-z-]+)", part, re.MULTILINE)
        }
        options, valued = {"--help", "-h"}, set[str]()
        for short, long, default, word in OPTION.findall(text):
            names = {name for name in (short, long) if name}
            options |= names
            if word or (default and default not in ("true", "false")):
                valued |= names
        return Usage(frozenset(commands), frozenset(options), frozenset(valued))

    def _said(self, *words: str) -> str:
        return subprocess.run([self._path, *words], check=True, capture_output=True, text=True).stdout

    def problem(self, words: list[str]) -> tuple[str, list[str], list[str]]:
        """Why a command line cannot be meant (or nothing), its subcommands, and its other words."""
        chain: list[str] = []
        rest: list[str] = []
        usage, queue = self.usage(), iter(words)
        for word in queue:
            if word == "--":
                break
            if word.startswith("-") and word != "-":
                name = word.split("=")[0] if word.startswith("--") else word[:2]
                # An option before the subcommand is one for every command; kubectl and helm list these only further in.
                if chain and name not in usage.options:
                    return f"no option {name}", chain, rest
                if _takes_a_word(word, name, usage if chain else self.usage(next(iter(sorted(usage.commands))))):
                    next(queue, None)
            elif not rest and (command := next((w for w in (word, word.removesuffix("s")) if w in usage.commands), "")):
                chain.append(command)  # `kubectl top pods` is `kubectl top pod`
                usage = self.usage(*chain)
            elif not chain:
                return f"no command {word}", chain, rest
            else:
                rest.append(word)
        return "", chain, rest


def _takes_a_word(word: str, name: str, usage: Usage) -> bool:
    return name in usage.valued and "=" not in word and (word.startswith("--") or len(word) == 2)


@functools.cache
def own_kinds() -> frozenset[str]:
    """Every name under which the API server knows the project's kinds."""
    return frozenset(_own_kinds())


def _own_kinds() -> Iterator[str]:
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        spec = yaml.safe_load(path.read_text())["spec"]
        names = spec["names"]
        yield from (
            names["plural"],
            names["singular"],
            f"{names['plural']}.{spec['group']}",
            *names.get("shortNames", ()),
        )


def unknown_kinds(chain: list[str], rest: list[str]) -> list[str]:
    """Kinds that neither the project nor the list of this module has."""
    if not chain or chain[-1] not in ABOUT_KINDS or not rest:
        return []
    said = [name.partition("/")[0].lower() for name in rest[0].split(",")]
    return [name for name in said if name not in {*KINDS, *own_kinds()} and not name.isupper() and "/" not in name[:1]]


@functools.cache
def known_names() -> frozenset[str]:
    """Labels and annotations of the project, as its source and its kinds spell them; ``earlyexit.dev`` itself may be a
    constant."""
    files = [*(ROOT / "operator").rglob("*.py"), *(ROOT / "core").rglob("*.py")]
    found = (
        re.findall(r"(?:earlyexit\.dev|\{[A-Z_]+\})/([a-z0-9-]+)", path.read_text(encoding="utf-8")) for path in files
    )
    return frozenset(f"earlyexit.dev/{name}" for names in found for name in names)
