"""A model and its data as they are given.

sources.py        from a model URI to `backbone.onnx`
locations.py      where models and data lie
data.py           inputs for `offramp prepare`
texts.py          texts of a JSON lines file, and the tokenizer beside a model
tokens.py         token models as graphs of one input: the ids
task.py           whether a model does the task that exits are made for
halves.py         models with float16 inside, computed in float32
preprocessing.py  the steps before a model, as its author wrote them down
"""
