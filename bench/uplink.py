"""A network of its own for one process, behind a link of a chosen rate; and a share of a processor. Linux, as root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE, THERE, THEIRS = "10.219.77.1", "10.219.77.2", "core0"  # the addresses, and the interface there
BURST_SECONDS, LEAST_BURST = 0.002, 3200  # a bucket holds two packets at least
LONGEST_QUEUE_MS = 4000
PERIOD_MICROS = 4000
CGROUPS = Path("/sys/fs/cgroup")


class NoNetworksError(Exception):
    """This machine cannot make networks; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Uplink:
    """The link between here and a network ``name``."""

    name: str
    here: str

    @property
    def within(self) -> tuple[str, ...]:
        """Runs the rest of a command line there."""
        return ("ip", "netns", "exec", self.name)

    def shape(self, mbit: float) -> None:
        """Let so many Mbit/s through in each direction (token bucket filter)."""
        burst = max(LEAST_BURST, int(mbit * 1e6 / 8 * BURST_SECONDS))
        rate = ("root", "tbf", "rate", f"{mbit:g}mbit", "burst", str(burst), "latency", f"{LONGEST_QUEUE_MS}ms")
        _run("tc", "qdisc", "replace", "dev", self.here, *rate)
        _run(*self.within, "tc", "qdisc", "replace", "dev", THEIRS, *rate)

    def cut(self) -> None:
        """Nothing goes through, and nobody here is told."""
        _run(*self.within, "ip", "link", "set", THEIRS, "down")

    def mend(self) -> None:
        _run(*self.within, "ip", "link", "set", THEIRS, "up")


@contextmanager
def uplink() -> Iterator[Uplink]:
    """A network at :data:`THERE`, reached from :data:`HERE`.

    Raises
    ------
    NoNetworksError
        Not root, or no ``ip`` and ``tc``.
    """
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise NoNetworksError(f"{missing[0]} is not installed (iproute2)")
    made = Uplink(f"offramp-{os.getpid()}", f"edge{os.getpid() % 100_000}")
    try:
        _run("ip", "netns", "add", made.name)
        _run("ip", "link", "add", made.here, "type", "veth", "peer", "name", THEIRS, "netns", made.name)
        _run("ip", "address", "add", f"{HERE}/30", "dev", made.here)
        _run("ip", "link", "set", made.here, "up")
        for command in (
            ("address", "add", f"{THERE}/30", "dev", THEIRS),
            ("link", "set", THEIRS, "up"),
            ("link", "set", "lo", "up"),
        ):
            _run(*made.within, "ip", *command)
        yield made
    finally:
        subprocess.run(("ip", "netns", "delete", made.name), capture_output=True, check=False)


@contextmanager
def share_of_a_processor(share: float, name: str) -> Iterator[tuple[str, ...]]:
    """A command that runs the rest of its line with so much of one processor, which all of this name have together; 1
    is no bound.

    Raises
    ------
    NoNetworksError
        Control groups for processors are not here.
    """
    if share >= 1:
        yield ()
        return
    old = CGROUPS / "cpu"
    group = (old if old.is_dir() else CGROUPS) / f"offramp-{os.getpid()}-{name}"
    quota = str(int(share * PERIOD_MICROS))
    try:
        group.mkdir()
        if old.is_dir():
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROS))
            (group / "cpu.cfs_quota_us").write_text(quota)
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_MICROS}")
    except OSError as error:
        raise NoNetworksError(f"no share of a processor can be given: {error}") from error
    try:
        yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
    finally:
        group.rmdir()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetworksError(f"`{' '.join(command)}`: {done.stderr.strip()}")
