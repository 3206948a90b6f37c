"""What the service says of itself: one JSON object a line. Never a key, and no prompt at this level."""

import json
import logging
import sys
import time
from typing import Any

_ROOM = "actors"


class JsonFormatter(logging.Formatter):
    """Writes time, level, where and what; `log_event` adds fields of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_event(log: logging.Logger, event: str, level: int = logging.INFO, **fields: object) -> None:
    """Log an event with its fields: `job` is always the job's id."""
    log.log(level, event, extra={"fields": {name: value for name, value in fields.items() if value is not None}})


def log_as_json() -> None:
    """Have this room's logs written to stderr as JSON; twice is as good as once."""
    log = logging.getLogger(_ROOM)
    if any(isinstance(handler.formatter, JsonFormatter) for handler in log.handlers):
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
