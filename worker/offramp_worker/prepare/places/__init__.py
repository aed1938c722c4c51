"""Where exits can sit in a graph.

cuts.py      where exits can be attached: the cut vertices of an ONNX graph
places.py    the places for exits of a model
axes.py      what the axes of a graph's tensors are, found by running it
channels.py  which axis of a tensor holds its channels
packing.py   a network's own exits between whose blocks several tensors pass
turning.py   features in another order than heads read them, turned in the graph
"""
