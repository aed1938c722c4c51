"""Offramp's domain library: plans, records, search, certificates, evidence and rollout decisions.

Pure functions over frozen data. Nothing here reads a file, a clock, an environment variable or a random
seed of its own: time and randomness arrive as arguments, results leave as values.
"""
