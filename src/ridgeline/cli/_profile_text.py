"""Print a StepProfile as a table."""

from collections.abc import Mapping

from rich.console import Console

from ridgeline.bench.profile import LAYERS, OpProfile, StepProfile
from ridgeline.cli._tables import new_table, plain_console
from ridgeline.core.config import Choice
from ridgeline.core.words import counted
from ridgeline.cost.efficiency import Calibration
from ridgeline.cost.hardware import Hardware

COLUMNS = ("op", "kind", "Mop", "MB", "bound by", "limit ms", "pred ms", "ms", "% roof", "% step")


def print_profiles(
    profiles: list[StepProfile],
    hardware: Hardware,
    num_threads: int,
    choices: Mapping[str, Choice],
    calibration: Calibration | None = None,
) -> None:
    """Print to standard output; no colour and no lines where that is not a terminal."""
    console = plain_console()
    at = f" at {hardware.machine.isa_level}" if hardware.machine.isa_level else ""
    console.print(
        f"Ceilings of {counted(num_threads, 'thread')}{at}: {hardware.stream(num_threads) / 1e9:.1f} GB/s from memory, "
        f"{hardware.cached(num_threads) / 1e9:.1f} GB/s from the cache"
    )
    peaks = {kind: hardware.peak(kind, num_threads) for kind in hardware.ops_per_s}
    if peaks:
        console.print(", ".join(f"{kind} {peak / 1e9:,.0f} Gop/s" for kind, peak in peaks.items() if peak))
    else:
        console.print("No peaks of arithmetic: without the native module only memory bounds are known")
    if hardware.was_busy:
        console.print("They were measured on a busy machine, and may be higher: ridgeline hardware --again")
    for name in ("kernels", "huge_pages"):
        if choice := choices.get(name):
            console.print(f"{name.replace('_', ' ').capitalize()}: {choice.value} ({choice.reason})")
    if calibration is None:
        console.print("Predictions are unknown: ridgeline profile --calibrate fits the efficiencies that they need")
    else:
        error = "unknown" if calibration.held_out_error is None else f"{calibration.held_out_error:.0%}"
        fitted = f"{len(calibration.efficiencies)} efficiencies of {calibration.measured_at}"
        console.print(f"Predicted by {fitted}; error of an op left out: {error}")
    for profile in profiles:
        console.print()
        _print(console, profile)


def _print(console: Console, profile: StepProfile) -> None:
    clock = profile.timed_step_s / profile.untimed_step_s - 1
    console.print(
        f"{profile.name}: {_ms(profile.step_s)} ms a step, {profile.num_tokens / profile.step_s:,.1f} tokens/s, "
        f"mean of the fastest {profile.num_steps}\n"
        f"median with a clock at every op {_ms(profile.timed_step_s)} ms, "
        f"without {_ms(profile.untimed_step_s)} ms ({clock:+.1%})"
    )
    peaks = ", ".join(f"{kind} {peak / 1e9:,.0f}" for kind, peak in profile.ops_per_s.items())
    console.print(f"ceilings of these seconds: {profile.stream_bytes_per_s / 1e9:.1f} GB/s from memory; Gop/s {peaks}")
    table = new_table(console, COLUMNS, left=2)
    table.padding = (0, 1, 0, 0)
    in_layers = False
    for op in profile.ops:
        if op.label.startswith(LAYERS) and not in_layers:
            table.add_row("layers")
        in_layers = op.label.startswith(LAYERS)
        table.add_row(*_cells(op, profile))

    measured_s = profile.measured_ops_s
    roof = f"{profile.limit_s / measured_s:.0%}" if measured_s else ""
    times = (_ms(profile.limit_s), _known(profile.predicted_s), _ms(measured_s))
    table.add_row("all ops", *[""] * 4, *times, roof, _share(measured_s, profile))
    rest = profile.rest_s | {"outside the ops": sum(profile.rest_s.values()), "step": profile.step_s}
    for name, seconds in rest.items():
        table.add_row(name, *[""] * 6, _ms(seconds), "", _share(seconds, profile))
    console.print(table)
    if successive_s := profile.successive_step_s:
        outside = f"{_ms(profile.outside_s)} ms ({profile.outside_s / successive_s:.1%}) more than the ops"
        console.print(f"steps in a row, each planned beside the one before: {_ms(successive_s)} ms, {outside}")


def _cells(op: OpProfile, profile: StepProfile) -> tuple[str, ...]:
    """Return the cells of a row, blank where there is nothing to compute or move."""
    label = f"  {op.label.removeprefix(LAYERS)} × {op.count}" if op.label.startswith(LAYERS) else op.label
    return (
        label,
        op.kind,
        f"{op.cost.flops / 1e6:,.1f}" if op.cost.flops else "",
        f"{op.cost.num_bytes / 1e6:,.2f}" if op.cost.num_bytes else "",
        "" if op.bound == "nothing" else op.bound,
        _ms(op.limit_s) if op.limit_s else "",
        _known(op.predicted_s),
        _ms(op.measured_s),
        "" if op.efficiency is None else f"{op.efficiency:.0%}",
        _share(op.measured_s, profile),
    )


def _known(predicted_s: float | None) -> str:
    return "unknown" if predicted_s is None else _ms(predicted_s)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _share(seconds: float, profile: StepProfile) -> str:
    return f"{seconds / profile.step_s:.1%}"
