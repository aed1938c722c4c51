"""One JSON line per notable event on stderr. Callers pass facts, never secrets or request contents.

The keys are those of the operator's log (docs/how-to/monitor.md): time, level, component, event, message, then facts.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson


def log_event(event: str, *, level: str = "info", message: str = "", **facts: Any) -> None:
    """Write one line: time (UTC), level, event, a message for people (the event, where that says it all) and the facts
    given."""
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "level": level,
        "component": "worker",
        "event": event,
        "message": message or event,
        **facts,
    }
    sys.stderr.write(orjson.dumps(line, default=str).decode() + "\n")
    sys.stderr.flush()


class JsonHandler(logging.Handler):
    """Sends what libraries log (uvicorn, asyncio) the same way."""

    def emit(self, record: logging.LogRecord) -> None:
        facts: dict[str, Any] = {"logger": record.name}
        if record.exc_info and record.exc_info[1] is not None:
            facts["error"] = repr(record.exc_info[1])
        log_event("library", level=record.levelname.lower(), message=record.getMessage(), **facts)


def route_library_logs() -> None:
    """Send warnings and errors of libraries through :class:`JsonHandler`."""
    root = logging.getLogger()
    root.handlers[:] = [JsonHandler()]
    root.setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(
        logging.ERROR
    )  # below are complaints about clients, one line per bad request
