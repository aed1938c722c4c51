"""A real server that generates on loopback, in this process, so that tests can ask its engine."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import stories
from processes import eventually

from offramp_worker.generate.doors.app import generation_app
from offramp_worker.generate.doors.streams import Door, Hub
from offramp_worker.generate.seam import Loaded
from offramp_worker.generate.settings import GenerationSettings
from offramp_worker.generate.worker import GenerationWorker
from offramp_worker.http.budget import ByteBudget
from offramp_worker.main import connections, listen
from offramp_worker.settings import Settings

ONCE = "Once upon a time"


@dataclass
class GenerationServer:
    """Use it as a context manager. ``engine`` computes; ``generation`` are the worker's settings."""

    engine: stories.StoriesEngine = field(default_factory=stories.StoriesEngine)
    generation: GenerationSettings = field(default_factory=GenerationSettings)
    settings: Settings = field(default_factory=lambda: Settings(bundle=Path(), host="127.0.0.1", port=0))

    def __enter__(self) -> GenerationServer:
        self._started, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(60)
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.openai.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        hub = self.hub = Hub(self._loop)
        self.worker = GenerationWorker(self.settings, self.generation, load=self._load, deliver=hub.deliver)
        self.budget = ByteBudget(self.settings.max_bodies_bytes)
        self.door = Door(self.worker, hub, self.budget, 1024 * 1024)
        self.worker.load()
        protocol = connections(self.settings, budget=self.budget)
        server = await listen("public", generation_app(self.worker, self.door), "127.0.0.1", 0, protocol=protocol)
        self.port = server.bound_port
        self._started.set()
        await self._stop.wait()
        self.worker.drain()
        server.should_exit = True
        self.worker.end_answers()
        await server.close()
        await asyncio.to_thread(self.worker.finish, seconds=30)

    def _load(self, folder: Path, *, threads: int, cache_bytes: int) -> Loaded:
        return Loaded(self.engine.bundle, self.engine, stories.tokenizer())

    def idle(self) -> bool:
        """Whether nothing is computed, nobody waits and nothing is kept."""
        load = self.worker.desk.load  # type: ignore[union-attr]
        return (
            load.waiting == load.running == load.reply_bytes == len(self.hub) == self.budget.used == 0
            and not self.engine.memory().used_bytes
        )

    def until_idle(self) -> None:
        eventually(self.idle, what="an idle worker")

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def complete(self, prompt: Any = ONCE, **fields: Any) -> httpx.Response:
        """``POST /v1/completions``, greedy unless it says otherwise."""
        return self.post("/v1/completions", {"model": "stories", "prompt": prompt, "temperature": 0} | fields)

    def metric(self, name: str, **labels: str) -> float:
        return self.worker.metrics.registry.get_sample_value(f"earlyexit_generation_{name}", labels) or 0.0


def with_settings(**fields: Any) -> GenerationSettings:
    return replace(GenerationSettings(), **fields)
