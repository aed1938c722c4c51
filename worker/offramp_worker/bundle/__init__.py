"""Exit bundles: verified loading, heads as ONNX nodes, and cutting the backbone into stages.

confidence.py  how sure an exit is, as nodes behind its head
dataflow.py    what an ONNX graph computes from what
graph.py       cutting the backbone between tensors and attaching heads
heads.py       heads as ONNX nodes: the one place that says what a ramp's parameters compute
lengths.py     rows of tokens that differ in length
load.py        load an exit bundle and trust none of it: hashes, digests, shapes
profile.py     what batches take
ramp_sets.py   the ramp-set store: folders with other heads for a bundle's model
stages.py      cutting a plan's stages out of the graph as ONNX Runtime optimises it
task.py        what a bundle is for, before anything else of it is read
tensors.py     tensors of an ONNX model, wherever they stand
"""
