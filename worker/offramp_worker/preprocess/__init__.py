"""What clients send, encoded images and texts, made into rows of the model's input by steps that a bundle declares.

:mod:`.images` decodes, resizes and crops, :mod:`.texts` divides into tokens, :mod:`.encoded` is what the doors call.
`offramp prepare` makes its rows with the same code, so that heads learn on what workers compute. Nothing of a bundle is
executed: its steps are numbers and names from a closed list, and a ``tokenizer.json``.
"""
