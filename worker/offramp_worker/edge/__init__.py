"""Edge and core: an edge worker answers what leaves at its exits and has a core worker answer the rest.

wire.py        what both say to each other
link.py        the edge's connection to its core, and whether it is there
proof.py       whether features mean the same on both machines
forwarding.py  rows that leave at no exit of the edge: sent, answered, or out of time
desk.py        audits of an edge: scored by the core after the reply
door.py        what a core takes from its edges
"""
