"""Open Inference Protocol v2 over gRPC, on a port of its own.

health.py    the health protocol of gRPC's own clients, probes and proxies
messages.py  the messages of the Open Inference Protocol v2
service.py   the Open Inference Protocol: what the REST port answers, over gRPC
"""
