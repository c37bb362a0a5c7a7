"""The option `tuning` where it names variants: "stream=4x4096,int8/int16:turns=panel", or a file that says the same."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from ridgeline.core.errors import ConfigError

MEANT = "auto, default, a file, or [KIND:]CHOICE=VARIANT,..."
Pin = tuple[str | None, str, str]
"""Kind of matrices, None for all that have it; choice; variant."""


class _File(msgspec.Struct):
    """Holds what is read of a file: `ridgeline hardware --json` writes it among other things."""

    variants: dict[str, dict[str, str]]


def parse_pins(asked: str) -> list[Pin]:
    """Return what `asked` names. Raises ConfigError where it is neither a list nor a file of variants."""
    path = Path(asked)
    if path.is_file():
        return list(_of_file(path))
    if "=" not in asked:
        raise ConfigError(f"tuning={asked!r} is no file and names no variant; give {MEANT}")
    return [_pin(asked, item) for item in asked.split(",")]


def _pin(asked: str, item: str) -> Pin:
    named, _, variant = item.strip().partition("=")
    kind, _, choice = named.rpartition(":")
    if not choice or not variant:
        raise ConfigError(f"tuning={asked!r}: {item!r} is not [KIND:]CHOICE=VARIANT")
    return kind or None, choice, variant


def _of_file(path: Path) -> Iterator[Pin]:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"tuning={path}: it is not JSON with an object of variants by kind: {error}") from error
    for kind, choices in found.variants.items():
        for choice, variant in choices.items():
            yield kind, choice, variant


def pinned(
    pins: Collection[Pin],
    defaults: Mapping[str, Mapping[str, str]],
    there: Mapping[str, Collection[tuple[str, str]]],
    *,
    other_kinds: bool,
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
