"""``offramp prepare --task generate``: from a checkpoint and prompts to a bundle whose variants and drafts are
measured.

bench.py        work that stops and resumes
checkpoint.py   a checkpoint as it was read
gguf.py         GGUF files of the architecture `llama`
huggingface.py  checkpoints in a folder as transformers saves them
llama2c.py      checkpoints of llama2.c (`stories260K.bin` with `tok512.bin`)
measuring.py    what variants and drafts do on prompts
picture.py      the picture of a report
pipeline.py     `offramp prepare --task generate`, step by step
prompts.py      prompts from JSON lines
report.py       what `offramp prepare --task generate` found
rounding.py     matrices in few bits: blocks of weights with a scale and a zero point each
sources.py      from `--model` to a checkpoint, whichever format it has
writing.py      writes a bundle for generation
vllm.py         `offramp prepare --task generate --vllm FILE`
"""
