"""Structured logs: one JSON object a line for machines, one plain line for people."""

from __future__ import annotations

import json
import logging
import sys
from enum import StrEnum
from typing import Any

from controld.contract.errors import ControldError


class LogFormat(StrEnum):
    """How a log line looks."""

    JSON = "json"
    TEXT = "text"


_STANDARD = set(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """Time, level, logger and message, every `extra` field, and for an error its stable code and traceback."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time_unix_s": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            if isinstance(error, ControldError):
                entry["code"] = error.code
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`12:00:01 warning controld.fleet: message key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        extras = "".join(f" {name}={value}" for name, value in _extras(record).items())
        level, stamp = record.levelname.lower(), self.formatTime(record, "%H:%M:%S")
        line = f"{stamp} {level} {record.name}: {record.getMessage()}{extras}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure_logging(log_format: LogFormat, level: str) -> None:
    """Send every logger of this process to standard error.

    Raises:
        ValueError: the level is not one of logging's names.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
