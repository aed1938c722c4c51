"""Helpers of the cluster tests: commands, and a namespace as a user sees it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


def run(*command: str, stdin: str | None = None) -> str:
    """A command that must succeed; its standard output."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, (
        f"{' '.join(command)} ended with {done.returncode}: {(done.stderr or done.stdout)[-3000:]}"
    )
    return done.stdout


@dataclass(frozen=True)
class Namespace:
    """A namespace that enforces restricted pod security."""

    name: str

    def apply(self, manifest: dict[str, Any]) -> None:
        run(
            "kubectl",
            "apply",
            "--server-side",
            "--field-manager=user",
            "-n",
            self.name,
            "-f",
            "-",
            stdin=yaml.safe_dump(manifest),
        )

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run("kubectl", "get", kind, name, "-n", self.name, "-o", "json"))
        return found

    def list(self, kinds: str) -> list[str]:
        return run("kubectl", "get", kinds, "-n", self.name, "-o", "name").split()

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        conditions = self.get("earlyexitservice", name).get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def eventually(self, what: str, holds: Callable[[], Any], *, seconds: float = 300.0) -> Any:
        """Poll until it holds; says what was last seen when it never does."""
        deadline = time.monotonic() + seconds
        while not (found := holds()):
            if time.monotonic() > deadline:
                seen = run(
                    "kubectl", "get", "earlyexitservices,rampconfigs,ramprollouts,pods", "-n", self.name, "-o", "yaml"
                )
                raise AssertionError(f"not within {seconds:.0f} s: {what}\n{seen[-6000:]}")
            time.sleep(1.0)
        return found
