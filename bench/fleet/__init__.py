"""One operator and thousands of services: what it costs to start on them and to keep them.
See :mod:`bench.fleet.__main__`."""
