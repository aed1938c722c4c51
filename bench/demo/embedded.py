"""``make demo``: the whole job on this machine, on the real handwritten digits that scikit-learn ships.

Trains a small residual network (once; cached by content), prepares exits, starts ``offramp up`` with two
workers, and tells the story of :mod:`bench.demo.story`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from rich.console import Console

from bench.demo.pools import Pool, prepare_digits
from bench.demo.story import Json, Settings, StoryError, Storyteller, ended, print_summary, problems, tell, write

SHUTDOWN_SECONDS = 60.0  # its own limits: 10 s for clients to leave, 18 s for answers and audits
BUILD = Path("build/demo")


class EmbeddedStage:
    """``offramp up`` as a subprocess; the user edits a file, and everything is read back from its state folder."""

    def __init__(self, manifest: Path, state: Path, log: Path) -> None:
        self._manifest, self._state, self._log = manifest, state, log
        self._process: subprocess.Popen[bytes] | None = None
        self._applied: Json | None = None

    def start(self) -> None:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "offramp_cli",
                    "up",
                    str(self._manifest),
                    "--state",
                    str(self._state),
                    "--port",
                    "0",
                    "--json",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    async def url(self) -> str:
        """The one address of the service, once it listens."""
        while True:
            for line in self._log.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if event.get("event") == "listening":
                        return str(event["url"])
            if self._process is not None and self._process.poll() is not None:
                raise StoryError(
                    f"`offramp up` ended with {self._process.returncode}; see "
                    f"{self._log}:\n{self._log.read_text()[-2000:]}"
                )
            await asyncio.sleep(0.1)

    def stop(self) -> int:
        """Ask for a clean shutdown; the exit code."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return -1

    async def apply(self, manifest: Json) -> None:
        self._applied = None
        temporary = self._manifest.with_suffix(".tmp")
        temporary.write_text(yaml.safe_dump(manifest, sort_keys=False))
        temporary.replace(self._manifest)
        if self._process is not None:
            before = (await self.service())["metadata"]["generation"]
            while (await self.service())["metadata"]["generation"] == before:
                await asyncio.sleep(0.1)
        self._applied = manifest

    def _objects(self, kind: str) -> list[Json]:
        found: list[Json] = [
            json.loads(path.read_text()) for path in sorted((self._state / "objects" / kind).glob("*.json"))
        ]
        return sorted(found, key=lambda o: str(o["metadata"]["creationTimestamp"]))

    async def service(self) -> Json:
        found = self._objects("EarlyExitService")
        return found[0] if found else {}

    async def rollouts(self) -> list[Json]:
        return self._objects("RampRollout")

    async def metrics(self) -> list[str]:
        workers: list[dict[str, Any]] = json.loads((self._state / "workers.json").read_text())["workers"]
        async with aiohttp.ClientSession() as session:
            pages = []
            for worker in workers:
                async with session.get(f"http://127.0.0.1:{worker['port']}/metrics") as response:
                    pages.append(await response.text())
        return pages

    async def check(self) -> list[str]:
        """What is stored as intent must be what the user wrote, whatever the control loop did meanwhile."""
        wanted, stored = self._applied, await self.service()
        if wanted is None or not stored or stored["spec"] == wanted["spec"]:
            return []
        return [f"the stored spec differs from the user's: {stored['spec']}"]


def manifest_of(bundle: Path) -> Json:
    """What a user would write, with canary steps sized for a demo's patience."""
    return {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "EarlyExitService",
        "metadata": {"name": "digits"},
        "spec": {
            "model": {"uri": f"file://{bundle.resolve()}"},
            "objective": {"latency": {"threshold": "500ms"}, "accuracy": {"maxDisagreement": "0.005"}},
            "ramps": {"mode": "Disabled", "maxOverhead": "0.1"},
            "rollout": {"steps": [{"weight": 30}, {"weight": 70}], "confidence": "0.95"},
            "replicas": 2,
        },
    }


def settings_of(digits: Pool) -> Settings:
    return Settings(
        name="Offramp on handwritten digits: two workers on this machine",
        model="digits",
        rate=digits.rate,
        clean=digits.clean,
        drifted=digits.drifted,
        reckless_ramp=digits.reckless_ramp,
        budget="0.005",
        loose_budget="0.05",
        measure_seconds=8.0,
        input_name=digits.input_name,
    )


async def run(console: Console) -> int:
    digits = prepare_digits(BUILD, console)
    work = BUILD / "run"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    manifest = manifest_of(digits.bundle)
    stage = EmbeddedStage(work / "service.yaml", work / "state", work / "up.jsonl")
    await stage.apply(manifest)
    console.print(f"\n[bold]offramp up {work / 'service.yaml'}[/]\n{(work / 'service.yaml').read_text()}")
    stage.start()
    try:
        teller = Storyteller(stage, settings_of(digits), manifest, [await stage.url()], BUILD, console)
        summary = await tell(teller)
    finally:
        code = stage.stop()
    if code != 0:
        summary["violations"].append(f"`offramp up` did not shut down cleanly (exit code {code})")
    write(teller, summary)
    print_summary(summary, console)
    return report(summary, BUILD, console)


def report(summary: Json, out: Path, console: Console) -> int:
    """Say what failed, if anything; the exit code."""
    return ended(problems(summary), console, picture=out / "story.png", summary=out / "summary.json")


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    console = Console()
    try:
        return asyncio.run(run(console))
    except StoryError as error:
        console.print(f"[bold red]the story took another turn:[/] {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
