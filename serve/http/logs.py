"""Logs on standard error: a line a request, and errors with their request's id."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from typing import Any

access = logging.getLogger("serve.access")
"""Takes the fields of a request's line."""

CURRENT_REQUEST: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request that is handled. The engine's thread serves many and has none."""


class PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.msg, dict):
            return " ".join("-" if value is None else _word(value) for value in record.msg.values())
        request = f"request {CURRENT_REQUEST.get()}: " if CURRENT_REQUEST.get() else ""
        return f"{record.levelname.lower()}: {request}{super().format(record)}"


class JsonFormatter(logging.Formatter):
    """A line is an object, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        fields = record.msg if isinstance(record.msg, dict) else self._error(record)
        return json.dumps({"time": round(record.created, 3), **fields})

    def _error(self, record: logging.LogRecord) -> dict[str, Any]:
        exception = self.formatException(record.exc_info) if record.exc_info else None
        fields = {"level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        return {**fields, "exception": exception, "request_id": CURRENT_REQUEST.get()}


FORMATTERS = {"off": PlainFormatter, "plain": PlainFormatter, "json": JsonFormatter}


def set_up(accesses: str) -> None:
    """Log to standard error: standard output has only the start-up line. accesses: how, a key of FORMATTERS."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)  # bm25s sets its own logger to DEBUG
    handler.setFormatter(FORMATTERS[accesses]())
    logging.getLogger().addHandler(handler)
    logging.getLogger("serve").setLevel(logging.INFO)
    access.setLevel(logging.WARNING if accesses == "off" else logging.INFO)


def _word(value: Any) -> str:
    """Replace characters that would add a word or a line to the log."""
    return "".join(c if c.isprintable() and c != " " else "?" for c in str(value))
