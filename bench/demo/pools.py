"""Models and traffic for the demos: trained or converted once, prepared once, kept by content."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

import offramp_worker.prepare
from bench.load import Traffic
from offramp_core.bundle import MANIFEST_FILE, PROFILE_FILE
from offramp_core.precision import EXACT
from offramp_worker.bundle.load import load_bundle
from offramp_worker.engine.execution.sessions import Sessions

WORKERS = 2
UTILISATION = 0.25  # of two workers without exits: audits, canaries, the load client and the neighbours need room
MAX_RATE = 200.0
JUDGED_ROWS, ROWS_AT_ONCE = 500, 100


@dataclass(frozen=True, slots=True)
class Pool:
    """A bundle, the traffic that goes to it, and how much of it this machine can take."""

    title: str
    model: str
    bundle: Path
    clean: Traffic
    drifted: Traffic
    reckless_ramp: str
    input_name: str
    rate: float


def prepare_digits(build: Path, console: Console) -> Pool:
    """Train the demo's model on scikit-learn's digits and prepare exits, or reuse what an earlier run made."""
    model = build / "model"
    _run([sys.executable, "-m", "bench.digits.train", "--out", str(model)])
    facts = json.loads((model / "model.json").read_text())
    bundle = build / "bundle"
    options = ["--name", "digits", "--head-share", "0.6", "--variations", "3"]
    prepare(bundle, model=facts["model"], data=model / "heads.npz", options=options, key=facts["key"], console=console)
    _run([sys.executable, "-m", "bench.digits.drift", "--model", str(model)])
    return _pool("digits of scikit-learn", bundle, model)


def prepare_cluster_pool(build: Path, console: Console, *, digits: bool = False) -> Pool:
    """ResNet-56 on CIFAR-10 where OFFRAMP_DATA has them; else, or when asked, the digits."""
    from bench.cifar.bundle import available, make_model

    if digits or not available():
        return prepare_digits(Path("build/demo"), console)
    model = build / "cifar"
    facts = make_model(model)
    bundle = build / "bundle"
    prepare(
        bundle,
        model=str(facts["model"]),
        data=model / "heads.npz",
        options=[
            *("--name", "resnet56", "--head-data", str(facts["head_data"]), "--head-share", "0.5"),
            *("--side", str(facts["side"])),
        ],
        key=str(facts["key"]),
        console=console,
    )
    return _pool("ResNet-56 on CIFAR-10", bundle, model)


def prepare(bundle: Path, *, model: str, data: Path, options: Sequence[str], key: str, console: Console) -> None:
    """`offramp prepare`, unless the bundle was made from the same model, options and code."""
    paths = ["--model", model, "--data", str(data), "--out", str(bundle)]
    command = ["prepare", *paths, "--compile-limit", "0", *options]  # a demo need not know how fast torch would be
    wanted = hashlib.sha256("\0".join([*command, key, _code()]).encode()).hexdigest()
    stamp = bundle.with_suffix(".key")
    if stamp.is_file() and stamp.read_text() == wanted and (bundle / MANIFEST_FILE).is_file():
        console.print(f"bundle: {bundle} (made earlier)")
        return
    console.print(f"[bold]offramp {' '.join(command)}[/]")
    _run([sys.executable, "-m", "offramp_cli", *command])
    stamp.write_text(wanted)


def _code() -> str:
    """Digest of the code that prepares."""
    folder = Path(offramp_worker.prepare.__file__).parent.parent
    parts = [path.read_bytes() for path in sorted([*folder.glob("prepare/**/*.py"), *folder.glob("bundle/**/*.py")])]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)


def _pool(title: str, bundle: Path, model: Path) -> Pool:
    manifest = json.loads((bundle / MANIFEST_FILE).read_text())
    profile = json.loads((bundle / PROFILE_FILE).read_text())
    exact = float(profile["batches"][0]["exact_seconds"])
    with np.load(model / "traffic.npz") as clean, np.load(model / "drifted.npz") as drifted:
        usual = Traffic(clean["x"], clean["reference"])
        return Pool(
            title=title,
            model=manifest["name"],
            bundle=bundle,
            clean=usual,
            drifted=Traffic(drifted["x"], drifted["reference"]),
            reckless_ramp=_reckless_ramp(bundle, usual),
            input_name=manifest["inputs"][0]["name"],
            rate=min(MAX_RATE, UTILISATION * WORKERS / exact),
        )


def _reckless_ramp(folder: Path, usual: Traffic) -> str:
    """The ramp that changes most answers if everybody leaves there. Of an easy model's, most are hardly beyond the
    budget."""
    bundle = load_bundle(folder)
    sessions = Sessions(bundle, threads=1)
    judged = min(JUDGED_ROWS, len(usual.x))
    wrong = sum(
        (sessions.tapped(usual.x[some]).prediction != usual.reference[some, None]).sum(axis=0)
        for some in (slice(start, start + ROWS_AT_ONCE) for start in range(0, judged, ROWS_AT_ONCE))
    )
    allowed = [j for j, column in enumerate(bundle.columns) if (column.precision or EXACT) == EXACT]
    return bundle.columns[max(allowed, key=lambda j: int(wrong[j]))].id
