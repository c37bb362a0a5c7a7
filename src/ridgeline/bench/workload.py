"""Every workload is made of these: BenchRequest, the Workload base class, and random token ids."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.core.errors import ConfigError
from ridgeline.core.options import check, option

if TYPE_CHECKING:
    import numpy as np

FIRST_RANDOM_TOKEN_ID = 3  # below it most vocabularies keep unk, bos, eos or pad


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One request to send. `arrival_s` counts from the start of the run; a workload without times leaves it 0."""

    prompt: str | list[int]
    max_tokens: int
    arrival_s: float = 0.0
    ignore_eos: bool = True


class Workload(ABC):
    """A frozen dataclass of options, checked as declared; equal options give equal requests, ordered by arrival."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check(self)

    @abstractmethod
    def requests(self) -> list[BenchRequest]:
        """Build every request. Raises ConfigError for a file that is missing or broken."""


def random_tokens(seed: int, stream: int, count: int, vocab_size: int) -> list[int]:
    """Draw `count` token ids, uniform in [FIRST_RANDOM_TOKEN_ID, vocab_size), fixed by (seed, stream).

    Each stream is independent of the others, so request 7 keeps its prompt when the workload grows.
    """
    return _generator(seed, stream).integers(FIRST_RANDOM_TOKEN_ID, vocab_size, size=count).tolist()


def lengths_rng(seed: int) -> "np.random.Generator":
    """Return a generator for a workload's own choices (lengths, order), apart from every `random_tokens` stream."""
    return _generator(seed, 0, 1)


def _generator(*words: int) -> "np.random.Generator":
    import numpy as np  # `bench --help` asks for the options of a load alone

    return np.random.default_rng(words)


def vocab_option() -> int:
    """Declare the number of token ids that random prompts are drawn from."""
    return option(512, low=FIRST_RANDOM_TOKEN_ID + 1)


def require(holds: bool, option: str, value: object, needed: str) -> None:
    """Raise ConfigError for an option of a workload or load that breaks its rule."""
    if not holds:
        raise ConfigError(f"{option} must be {needed}, got {value!r}")
