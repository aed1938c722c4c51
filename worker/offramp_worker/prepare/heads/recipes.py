"""How each kind of head is trained, with PyTorch and without."""

from __future__ import annotations

from dataclasses import dataclass

from offramp_core.bundle import HeadKind
from offramp_worker.prepare.source.data import FloatArray

WARM_UP_SHARE = 0.25
PATIENCE_SHARE = 0.5  # of all epochs without a better validation loss
MIN_DEVIATION = 1e-3
FEW_ROWS = 4_000

Parameters = dict[str, FloatArray]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a kind of head is trained."""

    #: learning_rate and weight_decay: of AdamW under a one-cycle schedule.
    learning_rate: float
    weight_decay: float
    #: Share of a layer's inputs left out of every step.
    dropout: float = 0.0
    #: Rows per step when there are thousands; 64 when there are few.
    batch: int = 256
    #: Steps aimed at, between ``fewest`` and ``most`` passes over the rows.
    steps: int = 400
    fewest: int = 12
    most: int = 60

    def schedule(self, rows: int) -> tuple[int, int]:
        """Batch size and number of epochs."""
        batch = self.batch if rows >= FEW_ROWS else min(64, self.batch)
        return batch, min(self.most, max(self.fewest, round(self.steps * batch / rows)))


# Strong decay and dropout are what keep 100-400 thousand weights honest on a few thousand inputs.
RECIPES: dict[HeadKind, Recipe] = {
    "pooled-linear": Recipe(1e-2, 1e-2, fewest=8),
    "grid-linear": Recipe(3e-3, 0.3, fewest=8),
    "grid-mlp": Recipe(2e-3, 0.3, dropout=0.3, fewest=14),
    "mean-linear": Recipe(1e-2, 1e-2, fewest=8),
    "mean-mlp": Recipe(2e-3, 0.3, dropout=0.3, fewest=14),
    "conv": Recipe(4e-3, 0.05, batch=128, steps=500, fewest=6, most=40),
}
