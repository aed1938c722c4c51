"""``offramp replay`` belongs to a package of its own: where that is not installed, the command says how to have it."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from offramp_cli import replay
from offramp_lab.replay.command import EXAMPLES


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """A command line on a machine without the laboratory."""
    monkeypatch.setattr(replay, "find_spec", lambda _name: None)
    app = typer.Typer()
    replay.add_replay(app)
    app.command("other")(lambda: None)
    return app


def test_without_the_laboratory_replay_says_what_to_install_whatever_was_asked(bare: typer.Typer) -> None:
    done = CliRunner().invoke(bare, ["replay", "scores.npz", "--budget", "0.01"])
    assert done.exit_code == 2
    assert "pip install 'offramp[replay]'" in done.stderr and "Traceback" not in done.stderr


def test_help_lists_it_all_the_same(bare: typer.Typer) -> None:
    done = CliRunner().invoke(bare, ["--help"])
    assert done.exit_code == 0 and "replay" in done.stdout


def test_with_the_laboratory_its_help_shows_examples() -> None:
    app = typer.Typer()
    replay.add_replay(app)
    app.command("other")(lambda: None)
    done = CliRunner().invoke(app, ["replay", "--help"])
    assert done.exit_code == 0 and all(example.split(" --")[0] in done.stdout for example in EXAMPLES)
