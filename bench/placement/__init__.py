"""A thousand GPUs of several kinds and twice as many services: who gets one, and what the others are told.
See :mod:`bench.placement.__main__`."""
