"""Decoders of the Llama family behind the seam, computed by ONNX Runtime's own kernels.

architecture.py  what a decoder of the Llama family is
bank.py          caches of answers that are written side by side
decoder.py       one variant of a model as a session of ONNX Runtime
drafts.py        what proposes tokens that the model then verifies, all at once
engine.py        the engine of the Llama family
graph.py         the graph of a decoder, built from its sizes
manifest.py      what a bundle for generation holds
sampling.py      from logits to the next token
"""
