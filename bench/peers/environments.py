"""The other servers, each in a virtual environment of its own under build/peers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("build/peers")
SERVERS = Path(__file__).parent / "servers"


@dataclass(frozen=True, slots=True)
class Peer:
    """``packages`` to install beside the ONNX Runtime of this environment; none: it runs in this environment.
    ``module`` is its server."""

    name: str
    packages: tuple[str, ...]
    module: str

    @property
    def python(self) -> Path:
        return FOLDER / self.name / "bin" / "python" if self.packages else Path(sys.executable)

    def command(self, model: Path, port: int) -> list[str]:
        return [str(self.python.absolute()), str(SERVERS / self.module), str(model.absolute()), str(port)]


PEERS = {
    peer.name: peer
    for peer in (
        Peer("bare", (), "bare.py"),
        Peer("litserve", ("litserve==0.2.19",), "lit.py"),
        Peer("mlserver", ("mlserver==1.7.1",), "ml.py"),
        Peer("bentoml", ("bentoml>=1.4,<1.4.40",), "bento.py"),
        Peer("ray", ("ray[serve]==2.60.0",), "rayserve.py"),
    )
}


class NotInstalledError(Exception):
    """A peer cannot be installed here; says why."""


def install(peer: Peer, *, onnxruntime: str) -> None:
    """Make the peer's environment unless it is there.

    Raises
    ------
    NotInstalledError
        The first line of what the installer said.
    """
    stamp = FOLDER / f"{peer.name}.installed"
    wanted = " ".join((*peer.packages, f"onnxruntime=={onnxruntime}"))
    if not peer.packages or (stamp.is_file() and stamp.read_text() == wanted):
        return
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        raise NotInstalledError("uv is not there; run make setup")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for command in (
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(FOLDER / peer.name)],
        [uv, "pip", "install", "--quiet", "--python", str(peer.python), *wanted.split()],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NotInstalledError(next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}"))
    stamp.write_text(wanted)
