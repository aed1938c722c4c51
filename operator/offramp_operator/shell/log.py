"""One structured line per transition. The Kubernetes shell writes JSON on stderr; the embedded shell formats the same
facts for people."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

LOGGER = logging.getLogger("offramp")


def log_event(
    event: str, message: str = "", *, level: int = logging.INFO, error: BaseException | None = None, **facts: Any
) -> None:
    """Tell one transition. ``facts`` are plain JSON values, never secrets or request contents; ``error`` adds a
    traceback."""
    LOGGER.log(level, "%s", message or event, exc_info=error, extra={"event": event, "facts": facts})


def record_facts(record: logging.LogRecord) -> dict[str, Any]:
    """A log record as the mapping that every format is made from."""
    line: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "component": "operator",
        "event": getattr(record, "event", record.name),
        "message": record.getMessage(),
        **getattr(record, "facts", {}),
    }
    if record.exc_info and record.exc_info[1] is not None:
        line["error"] = repr(record.exc_info[1])
        line["traceback"] = logging.Formatter().formatException(record.exc_info)
    return line


class JsonLines(logging.Formatter):
    """A log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(record_facts(record), default=str, ensure_ascii=False)


def configure_json_logging(*, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send everything that is logged to ``stream`` (default stderr) as JSON; libraries only from warnings on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    LOGGER.setLevel(level)
