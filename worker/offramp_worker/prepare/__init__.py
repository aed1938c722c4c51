"""``offramp prepare``: from a model and unlabelled inputs to an exit bundle.

The path of a model reads off the modules in this order: :mod:`.source.sources` loads and exports it,
:mod:`.places.cuts` finds where exits can sit, :mod:`.heads.features` runs it once over the data,
:mod:`.heads.distillation` trains heads, :mod:`.measuring.profiling` measures, :mod:`.heads.selection` refuses what
cannot pay, :mod:`.writing` writes the bundle; :mod:`.pipeline` is the story.

captured.py       training on captured inputs
picture.py        the picture at the end of `offramp prepare`
pipeline.py       `offramp prepare` from model and data to an exit bundle, step by step
progress.py       progress on stderr: bars on a terminal, one line per step elsewhere
refresh.py        `offramp prepare --refresh`: the heads of a bundle trained again on recent inputs
remeasure.py      `offramp prepare --remeasure`: what a bundle costs on another device or machine
report.py         what `offramp prepare` says at its end
writing.py        writes an exit bundle

source/     a model and its data as they are given
places/     where exits can sit in a graph
heads/      what heads learn from, and how
precision/  the backbone in fewer bits
measuring/  what pieces cost, and what plans could save
"""
