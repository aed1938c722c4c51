"""Doors of a worker that generates: OpenAI's API and Triton's generate extension, over HTTP.

app.py      the public port of a worker that generates
forms.py    what replies look like
streams.py  from a request on ASGI to its reply: whole, or a stream of server-sent events
"""
