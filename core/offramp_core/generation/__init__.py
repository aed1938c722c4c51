"""Decisions about generated answers: what an answer lost, who computes next, who is let in, which variants a plan
asks.

admission.py  which requests for generation are let in
columns.py    a generative model's variants as columns of records
classes.py    which classes of requests are decided about by themselves
drafts.py     which draft proposes tokens to the reference
levels.py     what settings of drafts have taken of late, and what trials of them may cost
losses.py     what an answer lost against the reference's answer to the same prompt
occupancy.py  what an answer takes of an engine that batches by itself
stops.py      stop strings in text that comes in pieces
turns.py      who computes next among answers that are being written and prompts that are being read
"""
