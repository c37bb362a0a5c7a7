"""What all fuzzers are made of: a target for each parser, changed inputs, and what counts as a finding.

A target takes any bytes. It returns True where they became a value, False where they were refused by a typed error;
whatever else it raises is a finding, and so are too many seconds and too much memory.
"""

import random
import resource
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

MAX_SECONDS = 2.0  # of this process
MAX_MORE_BYTES = 512 << 20  # of resident memory, beyond what the seeds took
NASTY = (0, 1, 2, 3, 7, 8, 13, 31, 33, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 1)
WORDS = (
    b"null",
    b"true",
    b"-1",
    b"0",
    b"1e999",
    b"NaN",
    b"1" * 400,
    b"\xff",
    b"\x00",
    b"\\ud800",
    b"\r\n",
    b"[" * 2000,
)


class Finding(Exception):
    """What a parser must not do."""


@dataclass(frozen=True)
class Target:
    """A parser, for at least one byte, and seeds. `words` are worth trying; most changes are in `head` bytes.

    `close` gives back what it holds.
    """

    run: Callable[[bytes], bool]
    seeds: Sequence[bytes]
    words: Sequence[bytes] = ()
    head: int | None = None
    close: Callable[[], None] = lambda: None


Open = Callable[[Path], Target]  # in a folder of its own


class Drawn(random.Random):
    """Takes its random choices from bytes, so that they are what a fuzzer changes; behind the last all are zeros."""

    def __new__(cls, data: bytes) -> "Drawn":
        return super().__new__(cls, 0)

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._left = data

    def getrandbits(self, k: int, /) -> int:
        size = -(-k // 8)
        taken, self._left = self._left[:size], self._left[size:]
        return int.from_bytes(taken.ljust(size, b"\0"), "little") >> (8 * size - k)

    def random(self) -> float:
        return self.getrandbits(24) / (1 << 24)


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[list[Exception]]:
    """Take errors of these kinds, which must say something; the list has what was raised."""
    refused: list[Exception] = []
    try:
        yield refused
    except kinds as error:
        if len(str(error)) < 8:
            raise Finding(f"the error says too little: {error!r}") from error
        refused.append(error)


def mutated(data: bytes, target: Target, rng: random.Random) -> bytes:
    """Return the input with one to eight changes."""
    changed = bytearray(data or b"\0")
    words = (*target.words, *WORDS)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        within = len(changed) if target.head is None or rng.random() < 0.1 else min(len(changed), target.head)
        at = rng.randrange(max(1, within))
        match rng.randrange(10):
            case 0:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 1:
                changed[at % len(changed)] = rng.randrange(256)
            case 2:
                changed[at : at + 8] = struct.pack("<Q", rng.choice(NASTY))
            case 3:
                changed[at : at + 4] = struct.pack("<I", rng.choice(NASTY) & 0xFFFFFFFF)
            case 4:
                del changed[at : len(changed) if rng.random() < 0.2 else at + rng.randrange(1, 40)]
            case 5:
                changed[at:at] = rng.randbytes(rng.randrange(1, 40))
            case 6:
                source = rng.randrange(max(1, within))
                changed[at:at] = changed[source : source + rng.randrange(1, 64)]
            case 7:
                other = rng.choice(target.seeds)
                begin = rng.randrange(len(other) or 1)
                changed[at:at] = other[begin : begin + rng.randrange(1, 64)]
            case _:
                word = rng.choice(words)
                changed[at : at + rng.choice((0, 0, 1, len(word)))] = word
        changed = changed or bytearray(b"\0")
    return bytes(changed)


@dataclass
class Checked:
    """Runs a target and knows what is a finding."""

    target: Target
    counts: Counter[str] = field(default_factory=Counter)
    seed_counts: Counter[str] = field(default_factory=Counter)
    max_bytes: int = 0

    def __post_init__(self) -> None:
        for seed in self.target.seeds:
            self(seed)
        self.max_bytes = peak_bytes() + MAX_MORE_BYTES
        self.seed_counts, self.counts = self.counts, Counter()

    def __call__(self, data: bytes) -> None:
        """Run one input. Raises Finding."""
        began_s = time.process_time()
        try:
            self.counts["taken" if self.target.run(data or b"\0") else "refused"] += 1
        except (Finding, KeyboardInterrupt):
            raise
        except BaseException as error:  # a panic of Rust code is no Exception
            raise Finding(f"{type(error).__name__}: {str(error)[:500]}") from error
        if (elapsed_s := time.process_time() - began_s) > MAX_SECONDS:
            raise Finding(f"it took {elapsed_s:.1f} s")
        if self.max_bytes and peak_bytes() > self.max_bytes:
            raise Finding(f"it took more than {MAX_MORE_BYTES >> 20} MiB")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def inputs(target: Target, seed: int) -> Iterator[bytes]:
    """Yield changed inputs without end, each by its number alone."""
    number = 0
    while True:
        rng = random.Random(f"{seed} {number}")
        yield mutated(rng.choice(target.seeds), target, rng)
        number += 1


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]
