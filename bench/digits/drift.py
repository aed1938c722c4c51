"""The demo's drift: a client begins to scale pixels differently, and the same digits are more than twice as bright.

Blur and noise make exits unsure, and a cautious plan rightly goes on. Brightness makes exits sure and wrong: of the
rows that a ramp would let leave at the median of its usual uncertainty, 1 to 20 % change their answer.

``python -m bench.digits.drift --model build/demo/model`` writes ``drifted.npz`` beside the traffic: x, y, and
``reference``, what the untouched PyTorch model answers on the drifted images.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from bench.digits.data import FloatArray

GAIN = 2.2


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="too bright images for the demo's traffic")
    parser.add_argument(
        "--model", type=Path, default=Path("build/demo/model"), help="folder that bench.digits.train wrote"
    )
    options = parser.parse_args(arguments)
    print(f"drifted traffic written to {write_drifted(options.model)}")


def write_drifted(folder: Path) -> Path:
    """Write ``drifted.npz`` for the traffic in ``folder``; returns its path."""
    from bench.digits.train import answers, load_model

    with np.load(folder / "traffic.npz") as traffic:
        x, y = brighten(traffic["x"]), traffic["y"]
    np.savez(folder / "drifted.npz", x=x, y=y, reference=answers(load_model(folder), x))
    return folder / "drifted.npz"


def brighten(x: FloatArray) -> FloatArray:
    """Images (n, 1, H, W) in another scale."""
    return np.asarray(GAIN * x, dtype=np.float32)


if __name__ == "__main__":
    main()
