"""A bundle and a plan as a model repository of Triton, served by its ONNX Runtime backend.

config.py      what Triton reads beside the graph: ``config.pbtxt``
graph.py       a plan as one ONNX graph, in which rows that leave are not computed any further
repository.py  the folder that Triton serves, checked and written
"""
