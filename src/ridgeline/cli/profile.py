"""Show where the time of a step goes, op by op, beside what the machine could do."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli._compute import Compute, computes
from ridgeline.cli._model import DtypeOption

if TYPE_CHECKING:
    from ridgeline.bench.profile import StepProfile
    from ridgeline.cost.hardware import Hardware
    from ridgeline.engine.build import Engine


@computes
def profile(
    compute: Compute,
    model: Annotated[str, typer.Argument(help="A folder, .gguf file, bundled model or hub id.")],
    batch: Annotated[int, typer.Option(min=0, max=1 << 12, help="Sequences in the decode steps; 0: no decoding.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each sequence at the last decode step.")] = 256,
    prompt: Annotated[int, typer.Option(min=0, help="Tokens of the prefill steps; 0: no prefill.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each kind; as many run untimed.")] = 8,
    all_ops: Annotated[bool, typer.Option("--all-ops", help="A row for every op of every layer.")] = False,
    dtype: DtypeOption = "auto",
    num_threads: Annotated[int | None, typer.Option(min=1, help="Threads; default: all usable cores.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show where the time of a step goes, beside what the machine could do.

    Real steps run through the engine, with random prompts and nothing cached. The machine's ceilings, those of --isa
    where it is given, are measured first where that has not been done yet.
    """
    from ridgeline.backends.probe import ceilings, find_native
    from ridgeline.bench.profile import Profiler, scheduler_config
    from ridgeline.core.config import CacheConfig, EngineConfig, ModelConfig
    from ridgeline.core.errors import RequestError
    from ridgeline.core.machine import usable_cores
    from ridgeline.engine.build import build_engine

    if not batch and not prompt:
        raise RequestError("nothing to profile: --batch and --prompt are both 0")
    threads = num_threads or usable_cores()
    config = EngineConfig(
        model=ModelConfig(model=model, dtype=dtype, max_model_len=max(context if batch else 1, prompt + 1)),
        cache=CacheConfig(prefix_caching=False, kv_dtype=compute.kv_dtype),
        scheduler=scheduler_config(batch, prompt),
        quantize=compute.quantize_config(),
        backend=compute.backend_config(),
        adapters=compute.adapters(),
        num_threads=threads,
    )
    engine = build_engine(config, lambda deltas: None)
    hardware = ceilings(find_native(), compute.isa)
    profiler = Profiler(engine, hardware, threads)
    profiles: list[StepProfile] = []
    if batch:
        profiles.append(profiler.decode(batch, context, steps, by_layer=all_ops))
    if prompt:
        profiles.append(profiler.prefill(prompt, steps, by_layer=all_ops))
    if json:
        typer.echo(_as_json(engine, hardware, threads, profiles))
    else:
        from ridgeline.cli._profile_text import print_profiles

        print_profiles(profiles, hardware, threads)


def _as_json(engine: "Engine", hardware: "Hardware", num_threads: int, profiles: "list[StepProfile]") -> str:
    """Times are seconds; the parts of a step are its ops and what `rest_s` has."""
    import msgspec

    document = {
        "model": engine.model_name,
        "choices": {name: asdict(choice) for name, choice in engine.choices.items()},
        "num_threads": num_threads,
        "hardware": hardware,
        "steps": [
            asdict(profile)
            | {"predicted_s": profile.predicted_s, "measured_ops_s": profile.measured_ops_s}
            | {"ops": [asdict(op) | {"efficiency": op.efficiency} for op in profile.ops]}
            for profile in profiles
        ],
    }
    return msgspec.json.encode(document).decode()
