"""The service's logs: one JSON object per line. Keys are never logged, and no prompts at this level."""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from wan_tpu.errors import WanTpuError

_PACKAGE = "actors"


class JsonFormatter(logging.Formatter):
    """Writes time, level, logger and event; `log_event` adds fields of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line of JSON."""
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
    """Log an event with its fields; `job` is always the job's id."""
    log.log(level, event, extra={"fields": {name: value for name, value in fields.items() if value is not None}})


async def repeat(log: logging.Logger, name: str, work: Callable[[], Awaitable[object]], every_s: float) -> None:
    """Repeat work until this is cancelled; errors are logged under the work's name."""
    while True:
        try:
            await work()
        except WanTpuError as error:  # The database, the storage or the pipeline fails, and will come back.
            log_event(log, name, logging.WARNING, reason=str(error))
        except Exception:
            log.exception(name)
        await asyncio.sleep(every_s)


def log_as_json() -> None:
    """Write this package's logs to stderr as JSON; calling this again changes nothing."""
    log = logging.getLogger(_PACKAGE)
    if any(isinstance(handler.formatter, JsonFormatter) for handler in log.handlers):
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
