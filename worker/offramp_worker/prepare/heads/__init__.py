"""What heads learn from, and how.

features.py      what heads learn from: pooled features of every place, and the model's own answers
fitting.py       fitting the ladder of heads, rung by rung
objectives.py    what heads are trained for, one definition for both trainers
plain.py         training heads without PyTorch, for the worker image
recipes.py       what the ways to train heads have in common, with PyTorch and without
trainer.py       what trains heads: PyTorch where it is installed, else NumPy alone
distillation.py  training heads, the backbone frozen, on the model's own answers
scales.py        one meaning for the scores of all exits
selection.py     what candidate ramps are worth
side.py          small models in front of the big one
"""
