"""Real scores of every ramp, recorded for `offramp replay` and the benchmarks: ``python -m bench.record NAME|all``."""
