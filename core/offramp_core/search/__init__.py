"""Exact search: thresholds for given ramps, and which ramps to use at all."""
