"""Which variants a model's matrices are computed by, and why. Called by native/backend.py before anything is loaded."""

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from ridgeline import _native
from ridgeline.backends.native.memory import PANEL
from ridgeline.backends.native.settings import MatrixFormat, Variants, kind_name
from ridgeline.backends.native.tuning.tuner import Effort, tune_all
from ridgeline.backends.native.tuning.workload import empty_matrix
from ridgeline.backends.probe import NativeModule, this_machine
from ridgeline.core.config import Choice
from ridgeline.core.errors import ConfigError
from ridgeline.core.log import get_logger
from ridgeline.cost.hardware import KernelTuning, Machine, cached_tunings, save_tunings

MIN_TUNED_BYTES = 64 << 20  # of a kind's matrices; fewer stay in caches, where little of what is chosen matters
MIN_BUFFER_BYTES = 64 << 20  # with less memory than this nothing can be measured
MIN_AGE = timedelta(hours=1)  # of a choice that is made again
MAX_BANDWIDTH_RATIO = 1.5  # beyond it the machine is not the one that was measured

MEANT = "auto, default, a file, or [KIND:]CHOICE=VARIANT,..."
Pin = tuple[str | None, str, str]
"""Kind of matrices, None for all that have it; choice; variant."""

log = get_logger("tuning")


class Chooser:
    """Chooses for one ISA level and number of threads."""

    def __init__(self, level: str, num_threads: int) -> None:
        self._level, self._num_threads = level, num_threads
        self._machine = this_machine(NativeModule(_native), level)

    def choose(self, asked: str, kinds: Mapping[MatrixFormat, int], *, deterministic: bool) -> tuple[Variants, Choice]:
        """Return the variants of each kind by its name, and why. `kinds` has the bytes of each kind's matrices.

        Where they are measured, at the first start with a kind, this takes up to two seconds. Raises ConfigError where
        `asked` names what is not there.
        """
        family = _native.cpu_family()
        empty = {form: empty_matrix(form, PANEL, PANEL) for form in kinds}
        defaults = {form: _native.default_variants(self._level, each, family) for form, each in empty.items()}
        by_name = {kind_name(form): choices for form, choices in defaults.items()}
        if asked == "default" or (asked == "auto" and deterministic):
            why = "as asked" if asked == "default" else "deterministic: nothing that is measured"
            return by_name, Choice(described(by_name), f"{why}; defaults of {family} CPUs")
        if asked != "auto":
            there = {kind_name(form): _native.variants_of(self._level, each) for form, each in empty.items()}
            chosen = pinned(parse_pins(asked), by_name, there, other_kinds=Path(asked).is_file())
            return chosen, Choice(described(chosen), "as asked")
        return self._measured(kinds, defaults, family)

    def cached(self) -> list[KernelTuning]:
        """Return what was measured before with this build of the kernels, at this level."""
        return [each for each in cached_tunings(self._machine) if each.kernels == kernels_build()]

    def stale(self) -> list[KernelTuning]:
        """Return of it what is old enough to be doubted: a machine that is busy for a while is the same machine."""
        now = datetime.now(UTC)
        return [each for each in self.cached() if now - datetime.fromisoformat(each.measured_at) > MIN_AGE]

    def forget(self) -> None:
        """Forget what was measured, so that the next start measures again."""
        _save(self._machine, [])

    def _measured(
        self, kinds: Mapping[MatrixFormat, int], defaults: Mapping[MatrixFormat, dict[str, str]], family: str
    ) -> tuple[Variants, Choice]:
        cached = self.cached()
        product = product_of(cached)
        if product is not None:
            for choices in defaults.values():
                if "product" in choices:
                    choices["product"] = product
        found = {each.kind: each for each in cached if each.num_threads == self._num_threads}
        large = [form for form, num_bytes in kinds.items() if num_bytes >= MIN_TUNED_BYTES]
        new = {form: defaults[form] for form in large if kind_name(form) not in found}
        effort = Effort.of(self._num_threads)
        if new and effort.buffer_bytes >= MIN_BUFFER_BYTES:
            tuned, seconds = tune_all(self._level, self._num_threads, new, effort, kernels_build(), product)
            found |= {each.kind: each for each in tuned}
            log.info("kernel variants of %s measured in %.1f s", ", ".join(each.kind for each in tuned), seconds)
            others = [each for each in cached if each.num_threads != self._num_threads]
            _save(self._machine, [*others, *found.values()])
        chosen: dict[str, dict[str, str]] = {}
        for form, choices in defaults.items():
            name = kind_name(form)
            chosen[name] = choices | (found[name].variants if name in found else {})
        measured = sorted(found[name].measured_at for name in chosen if name in found)
        reason = "the machine is too busy to measure" if new else "too small to measure"
        why = f"measured {measured[-1]}" if measured else f"{reason}; defaults of {family} CPUs"
        return chosen, Choice(described(chosen), why)


def product_of(cached: Iterable[KernelTuning]) -> str | None:
    """Return how this machine multiplies bfloat16, if that was measured: as it changes results, it is so once."""
    return next((each.variants["product"] for each in cached if "product" in each.variants), None)


def bandwidth_changed(stored_bytes_per_s: float, bytes_per_s: float) -> bool:
    """Tell whether two readings of memory are so far apart that they are of different machines."""
    high, low = max(stored_bytes_per_s, bytes_per_s), min(stored_bytes_per_s, bytes_per_s)
    return high > MAX_BANDWIDTH_RATIO * low


def kernels_build() -> str:
    """Name the build of the native module: what was measured with another one is measured again."""
    stat = Path(_native.__file__).stat()
    return f"{stat.st_size}-{stat.st_mtime_ns}"


def described(variants: Variants) -> str:
    """Say the variants of each kind in one line."""
    kinds = (f"{kind} " + " ".join(f"{a}={b}" for a, b in sorted(each.items())) for kind, each in variants.items())
    return "; ".join(kinds)


def _save(machine: Machine, tunings: list[KernelTuning]) -> None:
    try:
        save_tunings(machine, tunings)
    except (OSError, ConfigError) as error:
        log.warning("the choice of kernels could not be cached, so the next start makes it again: %s", error)


class _File(msgspec.Struct):
    """Holds what is read of a file: `ridgeline hardware --json` writes it among other things."""

    variants: dict[str, dict[str, str]]


def parse_pins(asked: str) -> list[Pin]:
    """Return what `asked` names. Raises ConfigError where it is neither a list nor a file of variants."""
    path, pins = Path(asked), list[Pin]()
    if path.is_file():
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_File)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"tuning={path}: it is not JSON with an object of variants by kind: {error}") from error
        return [(kind, *each) for kind, choices in found.variants.items() for each in choices.items()]
    if "=" not in asked:
        raise ConfigError(f"tuning={asked!r} is no file and names no variant; give {MEANT}")
    for item in asked.split(","):
        named, _, variant = item.strip().partition("=")
        kind, _, choice = named.rpartition(":")
        if not choice or not variant:
            raise ConfigError(f"tuning={asked!r}: {item!r} is not [KIND:]CHOICE=VARIANT")
        pins.append((kind or None, choice, variant))
    return pins


def pinned(
    pins: Collection[Pin], defaults: Variants, there: Mapping[str, Collection[tuple[str, str]]], *, other_kinds: bool
) -> dict[str, dict[str, str]]:
    """Return `defaults`, choices by kind, with the pins put in. `there` has all (choice, variant) of each kind.

    Raises ConfigError for a variant that a kind does not have, and unless `other_kinds`, for a kind that is not there.
    """
    chosen = {kind: dict(choices) for kind, choices in defaults.items()}
    for kind, choice, variant in pins:
        if kind is not None and kind not in chosen:
            if other_kinds:
                continue
            raise ConfigError(f"tuning: this model has no matrices of kind {kind!r}, but {', '.join(sorted(chosen))}")
        kinds = [kind] if kind is not None else [each for each in chosen if (choice, variant) in there[each]]
        if not kinds or (kind is not None and (choice, variant) not in there[kind]):
            known = sorted({f"{a}={b}" for each in ([kind] if kind else chosen) for a, b in there[each]})
            raise ConfigError(f"tuning: there is no {choice}={variant} here; there is {', '.join(known)}")
        for each in kinds:
            chosen[each][choice] = variant
    return chosen
