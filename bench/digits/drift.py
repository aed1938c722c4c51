"""The demo's drift: the same digits seen through a worse camera, out of focus and noisy.

``python -m bench.digits.drift --model build/demo/model`` writes ``drifted.npz`` beside the traffic: x, y, and
``reference``, what the untouched PyTorch model answers on the drifted images.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from scipy.ndimage import gaussian_filter

from bench.digits.data import FloatArray

BLUR_PIXELS = 0.9  # standard deviation, of 24 pixels
NOISE = 0.12  # standard deviation, of a range of 1


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="blur and noise for the demo's traffic")
    parser.add_argument(
        "--model", type=Path, default=Path("build/demo/model"), help="folder that bench.digits.train wrote"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(f"drifted traffic written to {write_drifted(options.model, seed=options.seed)}")


def write_drifted(folder: Path, *, seed: int) -> Path:
    """Write ``drifted.npz`` for the traffic in ``folder``; returns its path."""
    from bench.digits.train import answers, load_model

    with np.load(folder / "traffic.npz") as traffic:
        x, y = drift(traffic["x"], seed=seed), traffic["y"]
    np.savez(folder / "drifted.npz", x=x, y=y, reference=answers(load_model(folder), x))
    return folder / "drifted.npz"


def drift(x: FloatArray, *, seed: int, blur: float = BLUR_PIXELS, noise: float = NOISE) -> FloatArray:
    """Blur images (n, 1, H, W) and add noise to each; the same seed gives the same images."""
    rng = np.random.default_rng(seed)
    blurred = gaussian_filter(x, sigma=(0, 0, blur, blur))
    return np.asarray(blurred + noise * rng.standard_normal(x.shape), dtype=np.float32)


if __name__ == "__main__":
    main()
