"""Decisions about generated answers: what an answer lost, who computes next, who is let in, which variants a plan
asks."""
