"""Measure what this machine can do at most: memory streams and peak arithmetic, cached for later starts."""

import json as json_format
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ridgeline.cli._tables import new_table, plain_console
from ridgeline.core.errors import ConfigError
from ridgeline.core.words import counted

if TYPE_CHECKING:
    from ridgeline.backends.probe import NativeModule
    from ridgeline.cost.hardware import ByThreads, Hardware, KernelTuning


def hardware(
    again: Annotated[
        bool, typer.Option("--again", help="Measure again; kernels, at the next start of a model.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what this machine can do at most.

    Takes a few seconds the first time, and then shows the cached figures. Best on a machine that does nothing else.
    """
    from ridgeline.backends.probe import ceilings, find_native

    native = find_native()
    measured = ceilings(native, again=again)
    if json:
        typer.echo(_as_json(measured, native))
        return
    _print(plain_console(), measured, native)


def _as_json(hardware: "Hardware", native: "NativeModule") -> str:
    import msgspec

    from ridgeline.cost.hardware import cached_tunings

    machine = hardware.machine
    added = {
        "fingerprint": machine.fingerprint,
        "isa_levels": native.levels,
        "native_module": {"available": native.module is not None, "reason": native.reason},
        "steadiness": hardware.steadiness,
        "tunings": msgspec.to_builtins(cached_tunings(machine)),
        "variants": {tuning.kind: tuning.variants for tuning in cached_tunings(machine)},
        "ridge_ops_per_byte": {kind: hardware.ridge(kind, machine.num_cores) for kind in hardware.ops_per_s},
    }
    return json_format.dumps(msgspec.to_builtins(hardware, str_keys=True) | added)


def _print(console: Console, hardware: "Hardware", native: "NativeModule") -> None:
    from ridgeline.cost.hardware import cache_path, cached_tunings

    machine = hardware.machine
    memory = f"{machine.memory_bytes / 2**30:.1f} GiB of memory"
    console.print(f"{machine.cpu_model} · {machine.num_cores} usable cores · {memory}")
    if native.module is None:
        console.print(
            f"No native module: {native.reason}.\nLost: the native backend, so models run on the reference backend, "
            "and the peaks of arithmetic. The streams below are numpy's."
        )
    else:
        console.print(f"ISA level {machine.isa_level}, of those that run here: {', '.join(native.levels)}")
    console.print(f"Measured {hardware.measured_at}")
    with suppress(ConfigError):
        console.print(f"Cached in {cache_path(machine)}")
    cached = f"second-level cache, {hardware.cached_buffer_bytes >> 10} KiB a thread"
    streams = {"memory": hardware.stream_bytes_per_s}
    again = sorted(hardware.reread_bytes_per_s.items(), reverse=True)
    streams |= {f"{size >> 20} MiB, again and again": by_threads for size, by_threads in again}
    streams[cached] = hardware.cached_bytes_per_s
    _print_table(console, "Memory bandwidth (reads), GB/s", streams, {})
    console.print("(in brackets: 10th percentile, median and best of the readings)")
    ridges = {kind: hardware.ridge(kind, machine.num_cores) for kind in hardware.ops_per_s}
    _print_table(console, "Register-only products, Gop/s", {**hardware.ops_per_s}, ridges)
    _print_core(console, hardware)
    _print_tunings(console, cached_tunings(machine))
    if hardware.was_busy:
        console.print(
            f"\nThe machine was busy: readings fell to {hardware.steadiness:.0%} of their ceilings. "
            "Measure again when it is idle: ridgeline hardware --again"
        )


def _print_core(console: Console, hardware: "Hardware") -> None:
    """Print what the core does of plain instructions, and whether somebody else's work takes part of it."""
    scalar = hardware.scalar_per_cycle
    if scalar is None:
        return
    console.print(
        f"\nScalar additions a cycle: {scalar.p10:.1f} at the 10th percentile, {scalar.median:.1f} at the median, "
        f"{scalar.p90:.1f} at the 90th"
    )
    if hardware.is_shared:
        console.print(
            "Shared core: at times somebody else's work runs on the same core, and kernels get less of it than the "
            "loops above, which need few of its parts."
        )


def _print_tunings(console: Console, tunings: "Sequence[KernelTuning]") -> None:
    """Print the variant of each choice of kernels that was measured at a model's first start."""
    if not tunings:
        console.print("\nNo kernels chosen yet: a model's first start measures those of its matrices.")
        return
    console.print("\nKernels chosen at a model's first start: --tuning default ignores them, --again forgets them")
    for tuning in tunings:
        read = f"{tuning.read_bytes_per_s / 1e9:.1f} GB/s read"
        console.print(f"{tuning.kind}, {counted(tuning.num_threads, 'thread')}, {read}, {tuning.measured_at}")
        for each in tuning.choices:
            if each.variant == each.default:
                console.print(f"  {each.choice}={each.variant}, the default")
            else:
                console.print(
                    f"  {each.choice}={each.variant}, {each.score:.2f} times as fast as {each.default}, "
                    f"faster in {each.rounds_won} of {each.num_rounds} rounds"
                )


def _print_table(
    console: Console, title: str, rows: "Mapping[str, ByThreads]", ridges: Mapping[str, float | None]
) -> None:
    """Print one row per key with a column per thread count; `ridges` adds operations per byte of memory."""
    if not rows:
        return
    counts = sorted({count for by_threads in rows.values() for count in by_threads})
    columns = [counted(count, "thread") for count in counts]
    table = new_table(console, ["", *columns, *(["ridge, op/byte"] if ridges else [])], title=title)
    for name, by_threads in rows.items():
        giga = [[each / 1e9 for each in astuple(by_threads[count])] if count in by_threads else [] for count in counts]
        cells = ["{0:.1f} ({2:.1f} · {1:.1f} · {3:.1f})".format(*each) if each else "" for each in giga]
        ridge = ridges.get(name)
        table.add_row(name, *cells, *([] if ridge is None else [f"{ridge:.1f}"]))
    console.print()
    console.print(table)
