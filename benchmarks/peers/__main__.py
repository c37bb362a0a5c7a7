"""Ridgeline and its peers on one model and one workload, in turn, as ratios. See docs/howto/bench.md.

usage: python -m benchmarks.peers --model DIR [--ridgeline BITS LABEL OPTIONS]... [a peer's options]...

Every system runs alone in fresh processes, all of them once per repetition, those with equally many bits side by side,
and every second repetition in reverse. Greedy, end of sequence ignored, token ids in.
"""

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers import machine
from benchmarks.peers.report import OWN_ENGINE, CellFacts, Comparison, PeersReport, Run, SystemFacts, compare
from benchmarks.peers.systems import Job, LlamaCpp, System, SystemFailed, TokenEngine
from benchmarks.peers.workload import CELLS, Cell, PromptSource
from rich.console import Console

from ridgeline.bench.facts import machine_facts, software_facts
from ridgeline.bench.report import result_path, utc_now, write_report

BITS = (16, 8, 4)
MAX_NUM_SEQS = 64


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="model folder with config.json and safetensors")
    weights = {"nargs": 3, "action": "append"}
    parser.add_argument(
        "--ridgeline",
        **weights,
        metavar=("BITS", "LABEL", "OPTIONS"),
        help='keywords of LLM as JSON, "model": a file of the same model; default: 16 bf16 {"dtype": "bfloat16"}',
    )
    parser.add_argument("--transformers-python", type=Path, metavar="PYTHON", help="runs MODEL in bfloat16")
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="runs MODEL in bfloat16")
    parser.add_argument("--openvino-python", type=Path, metavar="PYTHON", help="has openvino-genai")
    parser.add_argument("--openvino", **weights, default=[], metavar=("BITS", "LABEL", "DIR"), help="an export of it")
    parser.add_argument("--llama-bin", type=Path, metavar="DIR", help="has llama-bench and llama-batched-bench")
    parser.add_argument("--gguf", **weights, default=[], metavar=("BITS", "LABEL", "FILE"), help="a conversion of it")
    parser.add_argument("--cells", nargs="+", choices=[cell.name for cell in CELLS], help="default: all")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=machine_facts().usable_cores)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shrink", type=int, default=1, metavar="N", help="1/N of the tokens, to try an engine out")
    parser.add_argument("--timeout-s", type=float, default=3600, help="of one system in one repetition")
    parser.add_argument("--name", default="peers", help="part of the result's file name")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "results")
    arguments = parser.parse_args(argv)
    if arguments.ridgeline is None:
        arguments.ridgeline = [["16", "bf16", '{"dtype": "bfloat16"}']]
    if min(arguments.repetitions, arguments.threads, arguments.shrink) < 1:
        parser.error("repetitions, threads and shrink must be at least 1")
    if not (arguments.model / "config.json").is_file():
        parser.error(f"--model {arguments.model}: no config.json in it")
    if arguments.openvino and arguments.openvino_python is None:
        parser.error("--openvino needs --openvino-python")
    if arguments.gguf and arguments.llama_bin is None:
        parser.error("--gguf needs --llama-bin")
    if bad := [w for w in arguments.ridgeline + arguments.openvino + arguments.gguf if w[0] not in map(str, BITS)]:
        parser.error(f"BITS must be one of {BITS}, got {bad[0][0]}")
    return arguments


def build_systems(arguments: argparse.Namespace, cells: Sequence[Cell]) -> list[System]:
    """All that the options name, those with equally many bits side by side."""
    max_model_len = max(cell.max_model_len for cell in cells)

    def engine(name: str, python: Path, bits: int, weights: str, model: Path, options: dict[str, object]) -> System:
        job = Job(
            model=model.resolve(),
            threads=arguments.threads,
            max_model_len=max_model_len,
            max_num_seqs=MAX_NUM_SEQS,
            options=options,
        )
        runner = TokenEngine(python=python, driver=f"run_{name}.py", job=job, timeout_s=arguments.timeout_s)
        return System(engine=name, bits=bits, weights=weights, options=options, runner=runner)

    systems = [
        engine(
            OWN_ENGINE, Path(sys.executable), int(bits), weights, Path(options.pop("model", arguments.model)), options
        )
        for bits, weights, text in arguments.ridgeline
        for options in [json.loads(text)]
    ]
    for name in ("transformers", "vllm"):
        if (python := getattr(arguments, f"{name}_python")) is not None:
            systems.append(engine(name, python, 16, "bf16", arguments.model, {}))
    for bits, weights, folder in arguments.openvino:
        systems.append(engine("openvino", arguments.openvino_python, int(bits), weights, Path(folder), {}))
    for bits, weights, file in arguments.gguf:
        runner = LlamaCpp(
            binaries=arguments.llama_bin, gguf=Path(file), threads=arguments.threads, timeout_s=arguments.timeout_s
        )
        systems.append(System(engine="llama.cpp", bits=int(bits), weights=weights, options={}, runner=runner))
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise SystemExit(f"systems need labels of their own, got {', '.join(names)}")
    return sorted(systems, key=lambda system: -system.bits)


def turn(systems: Sequence[System], repetition: int) -> Sequence[System]:
    """The order of a repetition: every second one goes backwards, so that nobody always comes first."""
    return systems[::-1] if repetition % 2 else systems


def run_system(
    system: System, repetition: int, arguments: argparse.Namespace, cells: Sequence[Cell], console: Console
) -> tuple[Run, dict[str, str]]:
    """One system once, and its versions. A failure is part of the result, with the cells measured before it."""
    vocab_size = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    stream_gb_per_s, load = machine.read_bandwidth_gb_per_s(arguments.threads), machine.load_average()
    values: dict[str, float] = {}
    error, versions = None, {}

    def prompts(cell: Cell) -> PromptSource:
        return PromptSource(arguments.seed, repetition, cell, vocab_size)

    def on_value(cell: Cell, value: float) -> None:
        values[cell.name] = value
        say(console, f"  {cell.label}: {value:.2f} {cell.unit}")

    say(console, f"repetition {repetition + 1}, {system.name}; memory bandwidth {stream_gb_per_s:.1f} GB/s")
    started_utc, started, ticks = utc_now(), time.perf_counter(), machine.cpu_times()
    try:
        versions = system.runner.run(cells, prompts, on_value)
    except (SystemFailed, RuntimeError) as failure:
        error = str(failure)
        say(console, f"  failed: {error}")
    run = Run(
        system=system.name,
        repetition=repetition,
        started_utc=started_utc,
        duration_s=time.perf_counter() - started,
        read_bandwidth_gb_per_s=stream_gb_per_s,
        load_average=load,
        steal_share=machine.steal_share(ticks, machine.cpu_times()),
        values=values,
        error=error,
    )
    return run, versions


def public_command(argv: Sequence[str]) -> str:
    """The command without the folders of this machine."""
    without_folders = [re.sub(r"[^=\"']*/(?=[^/])", "", argument.rstrip("/")) for argument in argv]
    return shlex.join(["python", "-m", "benchmarks.peers", *without_folders])


def say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_comparisons(console: Console, cells: Sequence[CellFacts], comparisons: Sequence[Comparison]) -> None:
    say(console, "\nmedians, ratio and its range; * the best peer with these bits")
    for cell in cells:
        for pair in comparisons:
            if pair.cell == cell.name:
                say(
                    console,
                    f"{cell.label}: {pair.own} {pair.own_median:.2f}, {pair.peer} {pair.peer_median:.2f} {cell.unit}: "
                    f"{pair.median_ratio:.2f} ({pair.min_ratio:.2f}–{pair.max_ratio:.2f}){' *' * pair.best_peer}",
                )


def build_report(
    arguments: argparse.Namespace,
    command: str,
    cells: Sequence[CellFacts],
    systems: Sequence[System],
    runs: Sequence[Run],
    versions: Mapping[str, dict[str, str]],
) -> PeersReport:
    """The result so far."""
    system_facts = [
        SystemFacts(
            name=system.name,
            engine=system.engine,
            bits=system.bits,
            weights=system.weights,
            options=system.options,
            versions=versions.get(system.name, {}),
        )
        for system in systems
    ]
    return PeersReport(
        name=arguments.name,
        created_utc=utc_now(),
        command=command,
        machine=machine_facts(),
        software=software_facts(),
        model=arguments.model.resolve().name,
        threads=arguments.threads,
        seed=arguments.seed,
        cells=list(cells),
        systems=system_facts,
        runs=list(runs),
        comparisons=compare(cells, system_facts, runs),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves the comparison, anew after every repetition. Exit status 1 if any run failed."""
    argv = sys.argv[1:] if argv is None else argv
    arguments, console = parse_arguments(argv), Console()
    cells = [cell.shrunk(arguments.shrink) for cell in CELLS if cell.name in (arguments.cells or [cell.name])]
    systems, cell_facts = build_systems(arguments, cells), [cell.facts() for cell in cells]
    runs: list[Run] = []
    versions: dict[str, dict[str, str]] = {}
    path = report = None
    for repetition in range(arguments.repetitions):
        for system in turn(systems, repetition):
            run, found = run_system(system, repetition, arguments, cells, console)
            runs.append(run)
            versions[system.name] = found or versions.get(system.name, {})
        report = build_report(arguments, public_command(argv), cell_facts, systems, runs, versions)
        path = path or result_path(arguments.out, report)
        write_report(path, report)
    assert report is not None
    print_comparisons(console, cell_facts, report.comparisons)
    say(console, f"written: {path}")
    return 1 if any(run.error for run in runs) else 0


if __name__ == "__main__":
    raise SystemExit(main())
