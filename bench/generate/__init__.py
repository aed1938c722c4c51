"""Figures of models that generate: ``python -m bench.generate PART``.

prepared.py   bundles to measure: stories260K and SmolLM2-135M
writing.py    answers of an engine, several at a time, and what they took
equality.py   greedy answers with drafts against those without
auto.py       drafts chosen by measurement against one setting for all requests
served.py     a worker's desk whose requests are computed in several ways by turns
speed.py      time per token by variant and draft, interleaved in one run
rivals        transformers, llama.cpp and onnxruntime-genai beside it, several prompts at once
tokens.py     scores of single tokens at trained exits, for the rules of papers
recorded.py   what each variant's whole answers lose, and what certifies
"""
