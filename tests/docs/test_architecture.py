"""The map agrees with the house: what a page or a docstring names is there, and what is there is named."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from website.modules import modules, packages

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
PATH = re.compile(r"`([\w./-]+/[\w./-]+)`")
NAME_OF = re.compile(r"`([A-Z][A-Z_]+|[A-Z][a-z]+[A-Z]\w+)` of `([\w./-]+\.py)`")
LISTED = re.compile(r"^([a-z]\w*\.py) ", re.MULTILINE)


def test_every_file_and_folder_that_the_architecture_names_exists() -> None:
    named = PATH.findall(PAGE.read_text())
    assert len(named) > 50
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_name_that_it_says_a_file_has_stands_there() -> None:
    found = NAME_OF.findall(PAGE.read_text())
    assert found
    assert [(name, path) for name, path in found if not re.search(rf"^{name}\b", (ROOT / path).read_text(), re.M)] == []


def test_every_package_has_a_room_in_it() -> None:
    text = PAGE.read_text()
    rooms = [package.relative_to(ROOT).as_posix() for package in packages()]
    missing = [room for room in rooms if len(room.split("/")) <= 3 and f"`{room}`" not in text and not top(room)]
    assert missing == []


def top(room: str) -> bool:
    """Whether a package only holds what starts it; its rooms are named instead."""
    return room in ("worker/offramp_worker", "operator/offramp_operator", "cli/offramp_cli") or room.startswith("cli/")


def test_every_module_says_what_it_is_for() -> None:
    silent = [package / name for package in packages() for name, told in modules(package).items() if not told]
    assert silent == []


def test_every_package_lists_all_of_its_modules() -> None:
    wrong = {}
    for package in packages():
        listed = LISTED.findall(ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or "")
        if set(listed) != set(modules(package)):
            wrong[package.relative_to(ROOT).as_posix()] = sorted(set(listed) ^ set(modules(package)))
    assert wrong == {}


def test_every_wall_that_is_promised_is_a_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    walls: dict[str, set[str]] = {}
    for contract in contracts:
        for source in contract["source_modules"] if contract["type"] == "forbidden" else ():
            walls.setdefault(source, set()).update(contract["forbidden_modules"])
    assert {"torch", "kubernetes", "time", "os"} <= walls["offramp_core"]
    assert "torch" in walls["offramp_operator"] and "kubernetes" in walls["offramp_worker"]
    assert "torch" in walls["offramp_worker.engine"]
    assert all("offramp_lab" in walls[f"offramp_{part}"] for part in ("core", "operator", "worker", "cli"))
