"""Doors of a worker that generates: OpenAI's API and Triton's generate extension, over HTTP."""
