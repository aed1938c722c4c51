"""vLLM behind the seam: each configuration of a bundle is a process of vLLM's, and a variant to everything else.

command.py    a configuration as vLLM's command line and environment
engine.py     answers of several processes of vLLM's, as one engine
keeper.py     the parent of one process of vLLM's, which outlives no worker
load.py       load a bundle for vLLM and trust none of it
manifest.py   what a bundle for vLLM holds
process.py    one process of vLLM's: started, watched, started again
stream.py     one answer that vLLM writes
"""
