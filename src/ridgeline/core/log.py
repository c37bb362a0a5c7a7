"""Set up one logger tree under `ridgeline`. Library code only gets loggers; the command line configures them."""

import logging


def get_logger(name: str) -> logging.Logger:
    """Return the logger `ridgeline.<name>`."""
    return logging.getLogger(f"ridgeline.{name}")
