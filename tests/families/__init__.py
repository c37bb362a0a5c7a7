"""Random small configs, one file per family, named after the `model_type` as the family's own file is.

A file has one function:

    tiny(choose: Choose) -> dict[str, object]      a random small config that varies whatever the family reads
"""

import pkgutil
import random
from importlib import import_module

from tiny_parts import Choose


def names() -> list[str]:
    """The families that have small configs."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def tiny(name: str, choose: Choose) -> dict[str, object]:
    """The small config of the family `name` for these choices."""
    if name not in names():
        raise LookupError(f"tests/families/{name}.py is missing: the tests need tiny(choose), a random small config")
    return import_module(f"{__name__}.{name}").tiny(choose)


def tiny_config(name: str, seed: int) -> dict[str, object]:
    """The `seed`-th random config of a family."""
    rng = random.Random(f"{name} {seed}")
    return tiny(name, lambda *options: rng.choice(options))
