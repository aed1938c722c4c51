"""Recorded scores in the state folder: one npz per ramp set, so that a restart need not collect them again."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.npz import read_npz
from offramp_operator.local.state import replace_file
from offramp_operator.shell.log import log_event
from offramp_operator.shell.record_pool import RampSetKey, RecordPool

_DIGEST_DIGITS = 12


def save_pool(folder: Path, ramp_set: RampSetKey, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write what :meth:`RecordPool.dump` gave."""
    content = io.BytesIO()
    names = np.array([ramp_set.backbone_digest, ramp_set.ramp_set_digest], dtype=np.str_)
    np.savez(content, allow_pickle=False, **{**arrays, "digests": names})
    replace_file(pool_file(folder, ramp_set), content.getvalue())


def load_pools(folder: Path) -> dict[RampSetKey, RecordPool]:
    """All pools of a folder; a file that cannot be read costs its records and nothing else."""
    pools = {}
    for path in sorted(folder.glob("*.npz")):
        try:
            with path.open("rb") as file:
                arrays = read_npz(file)
            backbone, ramps = (str(digest) for digest in arrays["digests"])
            pools[RampSetKey(backbone, ramps)] = RecordPool.load(arrays)
        except (OSError, ValueError, KeyError) as error:
            log_event(
                "records-lost", f"{path} cannot be read ({error}); they are collected anew", level=logging.WARNING
            )
    return pools


def keep_only(folder: Path, ramp_sets: set[RampSetKey]) -> None:
    """Remove the files of ramp sets that are gone."""
    kept = {pool_file(folder, ramp_set) for ramp_set in ramp_sets}
    for path in folder.glob("*.npz"):
        if path not in kept:
            path.unlink(missing_ok=True)


def pool_file(folder: Path, ramp_set: RampSetKey) -> Path:
    """Where the pool of one ramp set is kept."""
    return folder / f"{ramp_set.backbone_digest[-_DIGEST_DIGITS:]}-{ramp_set.ramp_set_digest[-_DIGEST_DIGITS:]}.npz"
