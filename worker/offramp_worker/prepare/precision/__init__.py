"""The backbone in fewer bits.

precisions.py    what approximates the backbone as a whole, and which precisions are tried on a device
judging.py       what a form of the model is worth beside fp32, and whether it may stay
folding.py       the graph that all of them are made of
quantizing.py    the backbone at int8: candidates, and which one stays
calibration.py   ranges of activations for static int8
convolutions.py  convolutions on integers, prepared so that they change few answers
products.py      matrix products with constant weights on integers
mixing.py        which convolutions stay in float although the rest runs on integers
halving.py       the backbone at fp16
"""
