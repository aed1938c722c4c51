"""What models take in memory, what must leave for them, and loads that do not end."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bundles
import httpx
import pytest
from shared import shared, write_models

from offramp_worker.shared.grpc import SharedInferenceService
from offramp_worker.shared.model import Model, Waiting
from offramp_worker.shared.repository import Repository, UnavailableError
from offramp_worker.shared.settings import shared_settings

MB = 10**6
FILE_BYTES = 40 * MB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Bundles of 40 MB each, nearly all of it a file that nobody reads."""
    for seed, name in enumerate("abc"):
        pad(bundles.write_bundle(tmp_path / name, seed=seed), FILE_BYTES)
    return tmp_path


def pad(bundle: Path, size: int) -> None:
    with (bundle / "notes.bin").open("wb") as file:
        file.truncate(size - sum(f.stat().st_size for f in bundle.iterdir()))


def run(folder: Path, names: Sequence[str], story: Callable[[Repository], Any], **env: str) -> None:
    file = write_models(folder, [{"name": name, "bundle": name} for name in names])

    async def begin() -> None:
        repository = Repository(shared_settings({"OFFRAMP_MODELS": str(file), **env}), on_lost=pytest.fail)
        try:
            await story(repository)
        finally:
            repository.drain()
            await repository.close(seconds=10)

    asyncio.run(begin())


@dataclass
class Process:
    resident_bytes: int = 100 * MB

    def grow(self, model: Model, size: int) -> None:
        """By that much while the model is loaded the next time."""
        worker, load = model.doors.worker, model.doors.worker.load

        def load_and_grow() -> None:
            worker.load = load  # type: ignore[method-assign]
            load()
            self.resident_bytes += size

        worker.load = load_and_grow  # type: ignore[method-assign]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    """The memory of a process in which nothing but what a test says takes or gives back any."""
    process = Process()
    monkeypatch.setattr("offramp_worker.shared.repository.resident_bytes", lambda: process.resident_bytes)
    return process


def test_bodies_that_come_while_a_model_is_loaded_are_not_its_memory_and_it_is_measured_again(
    folder: Path, process: Process
) -> None:
    async def story(repository: Repository) -> None:
        model = repository.models["a"]
        process.grow(model, 150 * MB)
        repository.bodies.take(150 * MB)
        await repository.load(model)
        assert model.ready and model.size_bytes == 2 * FILE_BYTES, "as was expected of it, and no more"
        repository.bodies.give(150 * MB)
        await repository.unload(model)
        await repository.load(model, by_hand=True)
        assert (model.size_bytes, model.sure) == (FILE_BYTES, True)

    run(folder, "a", story, OFFRAMP_MODELS_BYTES=str(100 * MB))


def test_a_model_that_took_too_much_is_told_so_and_measured_again_when_it_is_tried_again(
    folder: Path, process: Process
) -> None:
    async def story(repository: Repository) -> None:
        model = repository.models["a"]
        process.grow(model, 150 * MB)
        with pytest.raises(UnavailableError, match=r"it takes 1\d{8} bytes of the 50000000 of OFFRAMP_MODELS_BYTES"):
            await repository.load(model)
        await repository.load(model, by_hand=True)
        assert model.ready and model.size_bytes == FILE_BYTES

    run(folder, "a", story, OFFRAMP_MODELS_BYTES=str(50 * MB))


@pytest.mark.usefixtures("process")
def test_a_bundle_that_appears_or_changes_later_is_counted_as_it_is_when_it_is_loaded(folder: Path) -> None:
    async def story(repository: Repository) -> None:
        late, other = repository.models["late"], repository.models["a"]
        assert late.file_bytes == 0
        await repository.load(other)
        shutil.copytree(folder / "b", folder / "late")
        await repository.load(late)
        assert late.size_bytes == FILE_BYTES and other.state == "out"
        await repository.unload(late)
        pad(folder / "late", 110 * MB)
        with pytest.raises(UnavailableError, match=r"'late' needs 1\d{8} bytes; there are 75000000"):
            await repository.load(late, by_hand=True)

    run(folder, ("a", "late"), story, OFFRAMP_MODELS_BYTES=str(75 * MB))


def test_what_must_leave_first_counts_in_the_expected_wait(folder: Path) -> None:
    async def story(repository: Repository) -> None:
        a, b, c = repository.models.values()
        for model in (a, b):
            await repository.load(model)
        alone = repository.expected_seconds(c)
        b.leave_seconds = 60.0
        assert repository.expected_seconds(c) == alone, "one has to leave; nobody asks for either, so it is a"
        a.leave_seconds = 60.0
        assert repository.expected_seconds(c) == alone + 60.0
        with pytest.raises(UnavailableError, match="is being loaded, which takes about 6") as refused:
            repository.wait_for(c, Waiting(go=pytest.fail, refuse=lambda *_: None))
        assert refused.value.retry_after is not None and refused.value.retry_after >= 90

    run(folder, "abc", story, OFFRAMP_MODELS_BYTES=str(125 * MB))


@pytest.mark.usefixtures("process")
def test_who_was_told_to_come_back_finds_the_model_though_others_were_asked_for_more(folder: Path) -> None:
    async def story(repository: Repository) -> None:
        popular, promised, third = (repository.models[name] for name in "abc")
        await repository.load(popular)
        for _ in range(100):
            popular.asked()
        with pytest.raises(UnavailableError) as refused:
            repository.wait_for(promised, Waiting(go=pytest.fail, refuse=lambda *_: None))
        assert refused.value.retry_after is not None
        await repository.load(promised)  # which the refused request has begun
        await repository.load(third)
        assert promised.ready and not popular.ready, "nobody was told to come back for the popular one"
        promised.begin()
        promised.end()
        assert not promised.owed(time.monotonic()), "somebody has come"

    run(folder, "abc", story, OFFRAMP_MODELS_BYTES=str(125 * MB), OFFRAMP_LOAD_WAIT_SECONDS="0.001")


@pytest.mark.usefixtures("process")
def test_promises_are_broken_where_nothing_else_makes_room(folder: Path) -> None:
    async def story(repository: Repository) -> None:
        first, second = repository.models["a"], repository.models["b"]
        await repository.load(first)
        first.promise(60)
        await repository.load(second)
        assert second.ready and not first.ready

    run(folder, "ab", story, OFFRAMP_MODELS_BYTES=str(FILE_BYTES + 30 * MB))


def test_models_that_leave_for_one_leave_at_once(folder: Path) -> None:
    pad(folder / "c", 100 * MB)

    async def story(repository: Repository) -> None:
        a, b, c = repository.models.values()
        for model in (a, b):
            await repository.load(model)
        a.begin()
        b.begin()
        coming = asyncio.create_task(repository.load(c))
        while "leaving" not in (a.state, b.state) and not coming.done():
            await asyncio.sleep(0.01)
        assert (a.state, b.state) == ("leaving", "leaving")
        a.end()
        b.end()
        await coming
        assert c.ready

    run(folder, "abc", story, OFFRAMP_MODELS_BYTES=str(125 * MB))


def test_a_load_that_does_not_end_is_told_and_others_go_on(folder: Path) -> None:
    async def story(repository: Repository) -> None:
        model, other, end = repository.models["a"], repository.models["b"], threading.Event()
        worker, load, settings = model.doors.worker, model.doors.worker.load, repository.settings

        def hang() -> None:
            worker.load = load  # type: ignore[method-assign]
            end.wait()

        worker.load = hang  # type: ignore[method-assign]
        repository.settings = replace(settings, load_seconds=0.1)
        with pytest.raises(UnavailableError, match=r"has not ended within 0.1 s \(OFFRAMP_LOAD_SECONDS\)"):
            await repository.load(model)
        repository.settings = settings
        await repository.load(other)
        assert other.ready
        with pytest.raises(UnavailableError, match="has not ended"):
            await repository.load(model, by_hand=True)
        end.set()
        while model.hung is not None:
            await asyncio.sleep(0.01)
        await repository.load(model, by_hand=True)
        assert model.ready and not model.broken

    run(folder, "ab", story)


@pytest.mark.slow
def test_a_process_whose_load_hangs_serves_its_other_models_and_ends_when_it_is_told_to(folder: Path) -> None:
    file = write_models(folder, [{"name": "a", "bundle": "a"}, {"name": "late", "bundle": "late"}])
    (folder / "late").mkdir()
    with shared(file) as worker:
        os.mkfifo(folder / "late" / "manifest.json")  # who reads it waits for ever
        replies = list[httpx.Response]()
        asking = threading.Thread(target=lambda: replies.append(worker.load("late")))
        asking.start()
        while worker.index()["late"]["state"] != "LOADING":
            pass
        worker.answer("a", bundles.inputs(1))
        worker.process.terminate()
        assert worker.process.wait(60) == 0
        asking.join()
        assert "before the worker shut down" in replies[0].text


def test_a_client_that_has_gone_keeps_nobody_from_hearing_that_a_load_failed(folder: Path) -> None:
    async def story(repository: Repository) -> None:
        model, told = repository.models["a"], list[str]()
        service: Any = SharedInferenceService(repository)
        model.doors.rpc = SimpleNamespace()  # type: ignore[assignment]
        async with repository.changing:
            call = asyncio.create_task(service._loaded(model, None))
            await asyncio.sleep(0)
            repository.wait_for(model, Waiting(go=pytest.fail, refuse=lambda error, _: told.append(error)))
            assert len(model.waiting) == 2
            call.cancel()  # in the very turn of the loop in which the load fails
            model.turn_away("it is broken", retry_after=1)
            assert told == ["it is broken"]
        await asyncio.wait({call})

    run(folder, "a", story)
