"""Anytime-valid evidence from counts: one arm, two arms, a drift detector, and how much exposure a test needs.

betting.py    evidence from weighted audits: is their average above the budget?
detector.py   a detector that watches a stable plan for as long as it serves
exposure.py   minimum exposure: how much a gate must have seen before its silence means anything
graded.py     graded losses as errors that can be counted
intervals.py  intervals that hold at every moment at once
losses.py     audits that were drawn and lost
meter.py      what one worker process counts of a stable plan
one_arm.py    evidence from one arm: are its disagreements above, or below, the budget?
savings.py    what exits save, measured
slow.py       when a batch counts as slow
two_arm.py    evidence from two arms: does the canary have more than its share of bad batches?
words.py      E-values as people read them
"""
