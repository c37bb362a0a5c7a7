"""What a result was measured on: the machine and the software. Reads /proc, package metadata and git."""

import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The computer. `usable_cores` is what this process may run on; `accelerator` is named by the caller."""

    cpu_model: str
    usable_cores: int
    logical_cores: int
    memory_bytes: int
    operating_system: str
    accelerator: str | None

    @property
    def slug(self) -> str:
        """A folder name for results: the accelerator or the processor, and the cores."""
        name = re.sub(r"[^a-z0-9]+", "-", (self.accelerator or self.cpu_model).lower()).strip("-")
        return f"{name}-{self.usable_cores}c"


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
    """Facts of this machine. Works on Linux; the processor's name falls back to its architecture elsewhere."""
    return MachineFacts(
        cpu_model=_cpu_model(Path("/proc/cpuinfo")),
        usable_cores=len(os.sched_getaffinity(0)),
        logical_cores=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        operating_system=platform.platform(),
        accelerator=accelerator,
    )


def software_facts() -> SoftwareFacts:
    """Facts of this process's software."""
    package = Path(__file__).resolve().parents[1]
    # A package installed inside somebody else's repository must not take that repository's commit for its own.
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    return SoftwareFacts(
        ridgeline=_version("ridgeline"),
        commit=_git(package, "rev-parse", "HEAD") if tracked else None,
        uncommitted_changes=tracked and bool(_git(package, "status", "--porcelain", "--", ".")),
        python=platform.python_version(),
        torch=_version("torch"),
        numpy=_version("numpy"),
    )


def _cpu_model(cpuinfo: Path) -> str:
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if match:
            return match[1].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    """Standard output of git, or None when it fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
