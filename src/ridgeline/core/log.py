"""Set up one logger tree under `ridgeline`. Library code only gets loggers; the command line configures them.

Callers give the facts of a line as `extra={"facts": {...}}` beside its words: JSON has them by name.
"""

import json
import logging
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]


def get_logger(name: str) -> logging.Logger:
    """Return the logger `ridgeline.<name>`."""
    return logging.getLogger(f"ridgeline.{name}")


def set_up(form: LogFormat, level: str | int) -> None:
    """Write the lines of a server to stderr, as text or one JSON object each."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(handlers=[handler], force=True)  # in place of what every command has
    logging.getLogger("ridgeline").setLevel(level)


def in_use() -> tuple[LogFormat, int]:
    """Return what `set_up` was told, for another process that writes beside this one."""
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
    return "json" if is_json else "text", logging.getLogger("ridgeline").getEffectiveLevel()


class JsonFormatter(logging.Formatter):
    """Writes a record as a JSON object: its words, its facts by name, the stack of an error."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {"time": time, "level": record.levelname.lower(), "logger": record.name}
        line |= {"event": record.getMessage()} | getattr(record, "facts", {})
        if record.exc_info:
            line["stack"] = self.formatException(record.exc_info)
        return json.dumps(line)
