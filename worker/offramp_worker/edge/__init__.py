"""Edge and core: an edge worker answers what leaves at its exits and has a core worker answer the rest.

wire.py        what both say to each other
link.py        the edge's connection to its core, and whether it is there
proof.py       whether features mean the same on both machines
forwarding.py  rows that leave at no exit of the edge: sent, answered, or out of time
desk.py        audits of an edge: scored by the core after the reply
door.py        what a core takes from its edges
relay.py       requests that are handed to the core as they came, where it answers sooner
handed.py      which of them the core answers by its exits
kept.py        kept connections of the worker's event loop to its core
processor.py   how long the event loop waited for a processor
"""
