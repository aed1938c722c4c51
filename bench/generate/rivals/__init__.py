"""Other engines beside Offramp's, on the same numbers and prompts: ``python -m bench.generate rivals``.

converted.py   one checkpoint in the formats of other engines
engines.py     which engines, where they are installed, and how they are asked
compared.py    all of them in turns, in one run
children       what runs in the environments of the others
"""
