"""``offramp prepare``: from a model and unlabelled inputs to an exit bundle.

The path of a model reads off the modules in this order: :mod:`.sources` loads and exports it, :mod:`.cuts` finds
where exits can sit, :mod:`.features` runs it once over the data, :mod:`.training` trains heads, :mod:`.profiling`
measures, :mod:`.selection` refuses what cannot pay, :mod:`.writing` writes the bundle; :mod:`.pipeline` is the story.

axes.py           what the axes of a graph's tensors are, found by running it
calibration.py    ranges of activations for static int8
captured.py       training on captured inputs
channels.py       which axis of a tensor holds its channels
convolutions.py   convolutions on integers, prepared so that they change few answers
cuts.py           where exits can be attached: the cut vertices of an ONNX graph
data.py           inputs for `offramp prepare`
executors.py      the whole backbone on every executor at hand, timed
features.py       what heads learn from: pooled features of every place, and the model's own answers
fitting.py        fitting the ladder of heads, rung by rung
halves.py         models with float16 inside, computed in float32
locations.py      where models and data lie
mixing.py         which convolutions stay in float although the rest runs on integers
objectives.py     what heads are trained for, one definition for both trainers
outlook.py        what plans could save on a new bundle's records
packing.py        a network's own exits between whose blocks several tensors pass
picture.py        the picture at the end of `offramp prepare`
pipeline.py       `offramp prepare` from model and data to an exit bundle, step by step
places.py         the places for exits of a model
plain.py          training heads without PyTorch, for the worker image
precisions.py     what approximates the backbone as a whole
preprocessing.py  the steps before a model, as its author wrote them down
pricing.py        the backbone's segments and the heads as a worker runs them
products.py       matrix products with constant weights on integers
profiling.py      what the backbone's segments, the heads and regrouping cost on this machine
progress.py       progress on stderr: bars on a terminal, one line per step elsewhere
quantizing.py     the backbone at int8: candidates, and which one stays
refresh.py        `offramp prepare --refresh`: the heads of a bundle trained again on recent inputs
report.py         what `offramp prepare` says at its end
scales.py         one meaning for the scores of all exits
selection.py      what candidate ramps are worth
side.py           small models in front of the big one
sources.py        from a model URI to `backbone.onnx`
task.py           whether a model does the task that exits are made for
texts.py          texts of a JSON lines file, and the tokenizer beside a model
tokens.py         token models as graphs of one input: the ids
trainer.py        what trains heads: PyTorch where it is installed, else NumPy alone
training.py       training heads, the backbone frozen, on the model's own answers
turning.py        features in another order than heads read them, turned in the graph
writing.py        writes an exit bundle
"""
