"""Anytime-valid evidence from counts: one arm, two arms, a drift detector, and how much exposure a test needs."""
