"""Offramp's data plane: serves an exit bundle over the Open Inference Protocol."""

__version__ = "0.1.0"
