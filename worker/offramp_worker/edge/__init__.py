"""Edge and core: an edge worker answers what leaves at its exits and has a core worker answer the rest.

The edge's side is :mod:`offramp_worker.edge.forwarding` (rows), :mod:`offramp_worker.edge.desk` (audits) and
:mod:`offramp_worker.edge.link` (the connection); the core's is :mod:`offramp_worker.edge.door`.
:mod:`offramp_worker.edge.wire` is what both say to each other.
"""
