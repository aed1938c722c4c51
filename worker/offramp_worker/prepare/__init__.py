"""``offramp prepare``: from a model and unlabelled inputs to an exit bundle.

The path of a model reads off the modules in this order: :mod:`.sources` loads and exports it, :mod:`.cuts` finds
where exits can sit, :mod:`.features` runs it once over the data, :mod:`.training` trains heads, :mod:`.profiling`
measures, :mod:`.selection` refuses what cannot pay, :mod:`.writing` writes the bundle; :mod:`.pipeline` is the story.
"""
