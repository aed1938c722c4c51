"""One worker process that holds several bundles: each with plans, audits, counters and doors of its own, all on one
executor."""
