"""Which backend computes: the preferred one of those that do not refuse, or the one that was asked for.

Called by `engine/build.py`. Must not import torch, nor of a backend more than its module `backend`.
"""

import pkgutil
from collections.abc import Sequence
from importlib import import_module

from ridgeline import backends
from ridgeline.backends.base import Backend, ModelSource
from ridgeline.core.config import Choice, EngineConfig
from ridgeline.core.errors import ConfigError

ANY = "auto"


def names() -> list[str]:
    """Return the names of all backends: the folders of this package."""
    return sorted(module.name for module in pkgutil.iter_modules(backends.__path__) if module.ispkg)


def offers(asked: str = ANY) -> list[Backend]:
    """Return the backend of that name, or all of them with the preferred one first.

    Raises ConfigError for a name that no backend has.
    """
    if asked not in (ANY, *names()):
        raise ConfigError(f"backend must be one of {', '.join([ANY, *names()])}, got {asked!r}")
    chosen = names() if asked == ANY else [asked]
    found: list[Backend] = [import_module(f"{backends.__name__}.{name}.backend").BACKEND for name in chosen]
    return sorted(found, key=lambda backend: -backend.preference)


def computes(kind: str) -> str:
    """Return the name of the preferred backend that computes a kind of group as one, or of the last if none does."""
    found = offers()
    return next((backend.name for backend in found if kind in backend.kinds), found[-1].name)


def select(model: ModelSource, config: EngineConfig, offered: Sequence[Backend]) -> tuple[Backend, Choice]:
    """Return the first of `offered` that can compute the model, and why it was chosen.

    Raises ConfigError, with the reasons, where all refuse.
    """
    is_asked = config.backend.backend != ANY
    refused: list[str] = []
    for backend in offered:
        reason = backend.refuses(model, config)
        if reason is None:
            why = "; ".join(filter(None, [*refused, backend.caveat])) if refused else "this machine runs it"
            return backend, Choice(backend.name, "as asked" if is_asked else why)
        refused.append(f"no {backend.name} backend: {reason}")
        if is_asked:
            advice = "use --backend auto, or change what prevents it"
            raise ConfigError(f"the {backend.name} backend cannot be used: {reason}; {advice}")
    raise ConfigError("; ".join(refused))
