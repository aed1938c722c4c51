"""Cheaper forms of the model, made from the model and unlabeled inputs alone.

twin.py        an ONNX graph as a PyTorch module that learns
layers.py      layers with constant weights as matrices
lowrank.py     a layer becomes two thinner ones
pruning.py     channels inside of blocks are left out
shallow.py     blocks are left out
distilling.py  what is left learns the model's own answers, for a stated time
making.py      which variants are tried, how each is made, and where finished ones wait
choosing.py    which of them are on the frontier of time and disagreement
"""
