"""What clients send, encoded images and texts, made into rows of the model's input by steps that a bundle declares.

`offramp prepare` makes its rows with the same code, so that heads learn on what workers compute. Nothing of a bundle is
executed: its steps are numbers and names from a closed list, and a ``tokenizer.json``.

encoded.py  what the doors call: strings of bytes in, rows of the model's input out
images.py   encoded images to pixels of eight bits: decoded, resized, cut out of the middle
texts.py    texts as token ids, by a model's own `tokenizer.json`
"""
