"""The machine and the software that a result was measured on. Reads /proc, package metadata and git."""

import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ridgeline.core.machine import cpu_model, cpuinfo, memory_bytes

FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
SUFFIXES = {"amx_tile": "-amx", "avx_vnni": "-avx-vnni", "avx512_bf16": "", "avx512f": "-avx512", "avx2": "-avx2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The machine as it is. `usable_cores` is what this process may run on; `accelerator` is named by the caller.

    `cpu_features` are the flags of /proc/cpuinfo that decide which kernels run: one processor name covers several.
    """

    cpu_model: str
    cpu_features: tuple[str, ...]
    usable_cores: int
    logical_cores: int
    memory_bytes: int
    operating_system: str
    accelerator: str | None

    @property
    def slug(self) -> str:
        """Name a folder for results: the accelerator, or the processor and its instructions; and the cores.

        The newest instructions are named, but for AVX-512 with BF16: `amd-epyc-2c`, `amd-epyc-avx-vnni-2c`.
        """
        named = re.sub(r"\((r|tm)\)|\b(cpu|processor)\b", "", (self.accelerator or self.cpu_model).lower())
        widest = next((feature for feature in SUFFIXES if feature in self.cpu_features), "")
        suffix = "" if self.accelerator else SUFFIXES.get(widest, "")
        return f"{re.sub(r'[^a-z0-9]+', '-', named).strip('-')}{suffix}-{self.usable_cores}c"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareFacts:
    """Versions, None where a package is absent; the commit only when this package runs from its own repository."""

    ridgeline: str | None
    commit: str | None
    uncommitted_changes: bool
    python: str
    torch: str | None
    numpy: str | None


def machine_facts(accelerator: str | None = None) -> MachineFacts:
    """Return the facts of this machine.

    Works on Linux; the processor's name falls back to its architecture elsewhere.
    """
    return MachineFacts(
        cpu_model=cpu_model(),
        cpu_features=tuple(name for name in FEATURES if name in cpuinfo("flags").split()),
        usable_cores=len(os.sched_getaffinity(0)),
        logical_cores=os.cpu_count() or 1,
        memory_bytes=memory_bytes(),
        operating_system=platform.platform(),
        accelerator=accelerator,
    )


def software_facts() -> SoftwareFacts:
    """Return the facts of this process's software."""
    package = Path(__file__).resolve().parents[1]
    # A package installed inside somebody else's repository must not take that repository's commit for its own.
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    return SoftwareFacts(
        ridgeline=_version("ridgeline"),
        commit=_git(package, "rev-parse", "HEAD") if tracked else None,
        uncommitted_changes=tracked and bool(_git(package, "status", "--porcelain", "--", ".", ":/native")),
        python=platform.python_version(),
        torch=_version("torch"),
        numpy=_version("numpy"),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the standard output of git, or None when it fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
