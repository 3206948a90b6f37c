"""What the service says of itself: one JSON object a line. Never a key, and no prompt at this level."""

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


async def repeated(log: logging.Logger, what: str, work: Callable[[], Awaitable[object]], every_s: float) -> None:
    """Do work again and again until this is cancelled; what it raises is logged, under what it is about."""
    while True:
        try:
            await work()
        except WanTpuError as error:  # the database, the storage or the pipeline: they come back
            log_event(log, what, logging.WARNING, reason=str(error))
        except Exception:
            log.exception(what)
        await asyncio.sleep(every_s)


def log_as_json() -> None:
    """Have this package's logs written to stderr as JSON; twice is as good as once."""
    log = logging.getLogger(_PACKAGE)
    if any(isinstance(handler.formatter, JsonFormatter) for handler in log.handlers):
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
