"""What trains heads: PyTorch where it is installed, else NumPy alone, which knows no convolutions."""

from __future__ import annotations

try:
    from offramp_worker.prepare.heads.distillation import train_heads

    HAS_TORCH = True
except ModuleNotFoundError:
    from offramp_worker.prepare.heads.plain import train_heads

    HAS_TORCH = False

__all__ = ["HAS_TORCH", "train_heads"]
