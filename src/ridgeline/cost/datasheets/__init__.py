"""Datasheets of common GPUs and CPUs: what their makers say they do at most, one TOML file each, with its source.

A datasheet stands where a machine cannot be measured. What it does not tell is unknown: CPUs name no peak of arithmetic
that their clocks hold, and no datasheet names the bandwidth of a cache, so all is counted as from memory.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from ridgeline.core.errors import ConfigError
from ridgeline.cost.hardware import InputKind

FOLDER = resources.files(__name__)
CHANNEL_BYTES = 8  # a memory channel moves 64 bits a transfer


class Datasheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes one device, or `count` of them that share all work equally and talk for nothing: a limit, no forecast.

    `ops_per_s` are dense, a multiply-add is two. `memory_bytes` is None where the owner chooses. `link_bytes_per_s` is
    what a device sends to others of its kind in one direction.
    """

    name: str
    title: str
    kind: Literal["gpu", "cpu"]
    source: str
    memory_bytes: float | None = None
    bytes_per_s: float
    link_bytes_per_s: float | None = None
    ops_per_s: Mapping[InputKind, float] = msgspec.field(default_factory=dict)
    count: int = 1

    cache_bytes = 0  # none is known: everything comes from memory

    def peak(self, kind: InputKind, num_threads: int) -> float | None:
        """Return the operations per second on inputs of a kind; None where the datasheet does not tell."""
        return self.ops_per_s.get(kind)

    def stream(self, num_threads: int) -> float:
        """Return the bytes per second from memory."""
        return self.bytes_per_s

    def cached(self, num_threads: int) -> float:
        """Return the bytes per second from memory: no cache is known."""
        return self.bytes_per_s

    def reread(self, num_bytes: float, num_threads: int) -> float:
        """Return the bytes per second from memory: no cache is known."""
        return self.bytes_per_s

    def times(self, count: int) -> "Datasheet":
        """Return `count` of these devices as one."""
        names = {"name": f"{self.name}:{count}", "title": f"{count} × {self.title}", "count": count}
        memory_bytes = None if self.memory_bytes is None else count * self.memory_bytes
        ops = {kind: count * peak for kind, peak in self.ops_per_s.items()}
        speeds = {"bytes_per_s": count * self.bytes_per_s, "ops_per_s": ops}
        return msgspec.structs.replace(self, **names, **speeds, memory_bytes=memory_bytes)


def names() -> list[str]:
    """Return the names of all datasheets: the files of this folder."""
    return sorted(file.name.removesuffix(".toml") for file in FOLDER.iterdir() if file.name.endswith(".toml"))


def datasheet(name: str) -> Datasheet:
    """Return the datasheet of `NAME` or of `NAME:COUNT` devices. Raises ConfigError for one that is not there."""
    device, colon, count = name.partition(":")
    if colon and not (count.isascii() and count.isdecimal() and 1 <= int(count[:6]) <= 1024):
        raise ConfigError(f"{name[:80]!r} asks for no number of devices from 1 to 1024: write {device[:40]}:2")
    if device not in names():
        raise ConfigError(f"there is no datasheet of {device[:80]!r}; there are {', '.join(names())}")
    sheet = _read(device)
    return sheet.times(int(count)) if colon else sheet


@cache
def _read(name: str) -> Datasheet:
    written = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    if channels := written.pop("memory_channels", None):
        written["bytes_per_s"] = channels["count"] * channels["transfers_per_s"] * CHANNEL_BYTES
    return msgspec.convert({"name": name, **written}, type=Datasheet)
