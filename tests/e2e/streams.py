"""Clients of a model that generates."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter

import openai

WHO = ("Lily", "Tom", "Ben", "Sue", "Mia", "Max", "Anna", "Sam")
DID = ("had a big", "saw a little", "wanted a red", "found a shiny", "lost a", "made a")
WHAT = ("dog", "ball", "car", "cake", "tree", "bird", "hat", "book", "toy", "boat")
PROMPTS = [f"{who} {did} {what}." for who, did, what in itertools.product(WHO, DID, WHAT)]


class Readers:
    """Clients that stream answers one after the other; every stream must end with a reason."""

    def __init__(self, url: str, *, n: int) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._read, args=(seed,), daemon=True) for seed in range(n)]
        self.ended, self.broken = 0, list[str]()
        self.routes: Counter[str] = Counter()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _read(self, seed: int) -> None:
        random_ = random.Random(seed)
        while not self._stop.is_set():
            try:
                self._one(random_.choice(PROMPTS))
            except openai.OpenAIError as error:
                self.broken.append(repr(error))

    def _one(self, prompt: str) -> None:
        stream = self._client.completions.create(
            model="stories", prompt=prompt, max_tokens=12, temperature=0, stream=True
        )
        chunks = list(stream)
        if chunks[-1].choices[0].finish_reason is None:
            self.broken.append(f"a stream of {len(chunks)} pieces ended without a reason")
        self.ended += 1
        self.routes[chunks[-1].offramp["route"]] += 1  # type: ignore[attr-defined]
