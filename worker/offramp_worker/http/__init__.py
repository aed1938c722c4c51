"""The two ports: Open Inference Protocol v2 for clients, state and plans for the control plane.

admin.py       the admin port: state, plans and observations for the control plane
bodies.py      reading request bodies and writing replies straight on ASGI
budget.py      one bound for what all clients together may have in this process's memory
connection.py  one connection of the public port
health.py      the server's metadata, health and metrics, of one model or several
inference.py   inference over REST: from a request's headers and body to a response
large.py       large JSON requests, read in pieces
methods.py     HEAD and OPTIONS for every path of an application
packed.py      bodies that came gzip-compressed (RFC 1952), unpacked within a limit
public.py      the public port without inference (`offramp_worker.http.inference`)
refusals.py    what a connection says when it cannot take a request
tensors.py     Open Inference Protocol v2 request and response bodies
"""
