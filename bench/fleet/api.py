"""The API server of the bench: the one of tests/api, and a lean connection to it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import aiohttp

CONFTEST = Path(__file__).resolve().parents[2] / "tests" / "api" / "conftest.py"


def load_starter() -> Any:
    """The module that starts etcd and kube-apiserver for the tests."""
    spec = importlib.util.spec_from_file_location("offramp_api_server", CONFTEST)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def connect(server: str, token: str) -> aiohttp.ClientSession:
    """Many requests at once to a server on loopback whose certificate it signed itself."""
    connector = aiohttp.TCPConnector(ssl=False, limit=64)
    return aiohttp.ClientSession(server, connector=connector, headers={"Authorization": f"Bearer {token}"})
