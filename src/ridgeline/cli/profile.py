"""Show where the time of a step goes, op by op, beside what the machine could do."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli._options import with_options
from ridgeline.core.config import EngineConfig

if TYPE_CHECKING:
    from ridgeline.bench.profile import StepProfile


SETTLED = ("max_model_len", "prefix_caching", "max_num_seqs", "max_num_batched_tokens")  # by what is profiled


@with_options(without={*SETTLED, "task", "scheduling_policy", "max_itl_s", "max_itl_ratio", "seed"})
def profile(
    config: EngineConfig,
    batch: Annotated[
        int, typer.Option(min=0, max=1 << 12, help="Number of sequences in the decode steps; 0 leaves decoding out.")
    ] = 1,
    context: Annotated[
        int, typer.Option(min=1, help="Context of each sequence at the last decode step, in tokens.")
    ] = 256,
    prompt: Annotated[
        int, typer.Option(min=0, help="Number of tokens in the prefill steps; 0 leaves prefill out.")
    ] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Number of timed steps of each kind; as many run untimed.")] = 8,
    all_ops: Annotated[bool, typer.Option("--all-ops", help="Print a row for every op of every layer.")] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="First fit the efficiencies of ops that predictions need: a minute.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show where the time of a step goes, beside what the machine could do.

    Real steps run through the engine, with random prompts and nothing cached. The machine's ceilings, those of --isa
    where it is given, are measured first where that has not been done yet.
    """
    from ridgeline.backends.probe import Moment, ceilings, find_native
    from ridgeline.bench.calibrate import MAX_BATCH, MAX_PROMPT, calibration
    from ridgeline.bench.profile import Profiler, scheduler_config
    from ridgeline.core.errors import RequestError
    from ridgeline.core.machine import usable_cores
    from ridgeline.cost.hardware import load_calibration, save_calibration
    from ridgeline.engine.build import build_engine

    if not batch and not prompt:
        raise RequestError("nothing to profile: --batch and --prompt are both 0")
    threads = config.num_threads or usable_cores()
    fits = (MAX_BATCH, MAX_PROMPT) if calibrate else (0, 0)
    config = replace(
        config,
        model=replace(config.model, max_model_len=max(context if batch else 1, prompt + 1)),
        cache=replace(config.cache, prefix_caching=False),
        scheduler=scheduler_config(max(batch, fits[0]), max(prompt, fits[1])),
        num_threads=threads,
    )
    engine = build_engine(config, lambda deltas: None)
    hardware = ceilings(find_native(), config.backend.isa)
    level = hardware.machine.isa_level
    moment = Moment(find_native(), level, threads) if level else None
    profiler = Profiler(engine, hardware, threads, moment=moment)
    if calibrate:
        save_calibration(hardware.machine, calibration(profiler, threads))
    profiler.calibration = found = load_calibration(hardware.machine, threads)
    profiles = [profiler.decode(batch, context, steps, by_layer=all_ops)] if batch else []
    profiles += [profiler.prefill(prompt, steps, by_layer=all_ops)] if prompt else []
    choices = {**engine.info.choices, **engine.executor.facts()}
    if json:
        facts = {"model": engine.info.model_name, "choices": choices, "num_threads": threads, "hardware": hardware}
        typer.echo(_as_json({**facts, "calibration": found}, profiles))
    else:
        from ridgeline.cli._profile_text import print_profiles

        print_profiles(profiles, hardware, threads, choices, found)


def _as_json(facts: dict[str, object], profiles: "list[StepProfile]") -> str:
    """Render `facts` and the steps. Times are seconds; the parts of a step are its ops and what `rest_s` has."""
    import msgspec

    def plain(profile: "StepProfile") -> dict[str, Any]:
        sums = {name: getattr(profile, name) for name in ("limit_s", "predicted_s", "measured_ops_s")}
        return asdict(profile) | sums | {"ops": [asdict(op) | {"efficiency": op.efficiency} for op in profile.ops]}

    return msgspec.json.encode(facts | {"steps": [plain(profile) for profile in profiles]}).decode()
