"""vLLM behind a worker: what the tests need of the real one.

environment.py  vLLM for CPUs in an environment of its own
tiny.py         a decoder from a seed, to be made anew wherever its recorded answers are used
record.py       `python -m bench.vllm.record`: what the real vLLM says to a worker, for the tests
replay.py       in the place of a Python that has vLLM: records what the real one says, or says it again
"""
