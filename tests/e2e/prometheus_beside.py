"""A real Prometheus beside a service, and what it answers to the queries of the chart's dashboards."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from bench.ports import free_port

ROOT = Path(__file__).parents[2]
FILES = ROOT / "helm" / "offramp" / "files"
SCRAPE_SECONDS = 2
GENERATED = "Generated answers"  # the row of services that write text


@contextlib.contextmanager
def prometheus(folder: Path, *, operator: int) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes what docs/reference/metrics.md says, with the chart's rules."""
    built = subprocess.run([ROOT / "cluster" / "tools", "prometheus"], capture_output=True, text=True, check=True)
    config = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": "5s"},
        "rule_files": [str(path) for path in sorted((FILES / "rules").glob("*.yaml"))],
        "scrape_configs": [
            {"job_name": "operator", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{operator}"]}]},
            {
                "job_name": "workers",
                "http_sd_configs": [{"url": f"http://127.0.0.1:{operator}/targets", "refresh_interval": "2s"}],
            },
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                Path(built.stdout.strip()) / "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client:
            _await_ready(client)
            yield client
    finally:
        process.terminate()
        process.wait(30)


def _await_ready(client: httpx.Client) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/-/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError("Prometheus was not ready within 120 s")


def asked(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(f"/api/v1/{path}", params=query).json()
    assert answer["status"] == "success", (query, answer)
    return answer["data"]


def values(client: httpx.Client, expr: str, *, since: float, service: str = "tiny") -> list[float]:
    """Every finite value that an expression had since a time."""
    for name, value in (("$namespace", "default"), ("$service", service), ("$__rate_interval", "1m")):
        expr = expr.replace(name, value)
    series = asked(client, "query_range", query=expr, start=since, end=time.time(), step=SCRAPE_SECONDS)["result"]
    found = [float(value) for one in series for _, value in one["values"]]
    return [value for value in found if math.isfinite(value)]


def queries() -> list[tuple[str, str, str]]:
    """Row, title and query of everything that a panel of a dashboard asks."""
    found: list[tuple[str, str, str]] = []
    for path in sorted((FILES / "dashboards").glob("*.json")):
        row = ""
        for panel in json.loads(path.read_text())["panels"]:
            row = panel["title"] if panel["type"] == "row" else row
            found += [(row, panel["title"], target["expr"]) for target in panel.get("targets", ())]
    return found


def without_data(
    client: httpx.Client, asked_for: list[tuple[str, str, str]], *, since: float, service: str = "tiny"
) -> dict[str, list[str]]:
    """The queries that had no finite value since a time, by their panel's title."""
    empty: dict[str, list[str]] = {}
    for _, title, expr in asked_for:
        if not values(client, expr, since=since, service=service):
            empty.setdefault(title, []).append(expr)
    return empty
