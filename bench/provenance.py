"""When, from which commit and on which processor something was measured: what tells a new figure from one that an
earlier page keeps."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
CODE = ("core", "operator", "worker", "cli", "lab", "bench")


def provenance() -> dict[str, str]:
    """Of a measurement that ends now."""
    info = CPU_INFO.read_text() if CPU_INFO.is_file() else ""
    return {"when": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit(), "processor": processor(info)}


def words(found: Mapping[str, str] | None) -> str:
    """In a few words; empty where nothing was noted."""
    return f"{found['when']}, {found['commit']}, {found['processor']}" if found else ""


def commit() -> str:
    """The short name of the commit; with a plus sign where code was changed since."""
    name = _git("rev-parse", "--short", "HEAD")
    return (name + ("+" if _git("status", "--porcelain", "--", *CODE) else "")) if name else "no commit"


def processor(info: str) -> str:
    """The model's name and what its speed at int8 and fp32 hangs on, from the text of /proc/cpuinfo."""
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    stripped = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(stripped.get("flags", "").split())
    vector = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "no AVX2"
    vnni = "VNNI" if flags & {"avx512_vnni", "avx_vnni"} else "no VNNI"
    return f"{stripped.get('model name', 'unknown processor')} ({vector}, {vnni})"


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
