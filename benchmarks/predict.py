"""How far predicted step times are from measured ones: mixed steps of an engine, each priced as it was planned.

usage: python -m benchmarks.predict MODEL [--formats bf16 int8 int4 kv-int8] [--steps 1000] [--runs 5]
       [--held-out MODEL ...]

A MODEL is a folder, a bundled model, or one of moe, recurrent and dense: made here, of random weights (needs
transformers). For each format so many steps are run: prompts in chunks, one or many sequences that decode, of several
lengths, or both at once. The models of --held-out follow, predicted with what was fitted on the first one. A step is
disturbed where another process took a core from this one while it ran.

The same steps are run several times, each run in an engine of its own, and predicted by a calibration just before it: a
shared machine has another pace a minute later. `repeated` is how far a step of one run is from that step of the others:
what the machine leaves to a prediction from afar. `typical` compares the medians of a step's runs.
"""

import argparse
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import numpy as np
from benchmarks.common import calibrate, option_parser, save, write_random
from rich.console import Console
from rich.table import Table

from ridgeline.backends.probe import ceilings, find_native
from ridgeline.bench.arrivals import greedy_requests
from ridgeline.bench.report import Report
from ridgeline.bench.workload import BenchRequest
from ridgeline.core.config import EngineConfig
from ridgeline.cost.efficiency import Behind
from ridgeline.decoding.request import Request
from ridgeline.engine.build import build_engine
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.recording import read_recording
from ridgeline.explain.machine import SimulatedMachine, simulated_machine
from ridgeline.program.pricing import Load

FORMATS = {"bf16": {}, "int8": {"quantize": "int8"}, "int4": {"quantize": "int4"}, "kv-int8": {"kv_dtype": "int8"}}
SEQUENCES = (1, 4, 16, 2, 8, 3, 12, 6)  # under way at once, each for as many steps
MAX_SEQUENCES, MAX_TOKENS = max(SEQUENCES), 64
OUTPUTS = (16, 64)
WARM = 8  # steps that are left out
SHARED = {"vocab_size": 32768, "tie_word_embeddings": True}
ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096}
RANDOM = {
    "dense": (
        "Qwen3ForCausalLM",
        {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 12, "head_dim": 128},
    ),
    "moe": (
        "Qwen3MoeForCausalLM",
        {"hidden_size": 768, "num_hidden_layers": 8, "head_dim": 96, "num_experts": 32, "num_experts_per_tok": 4,
         "moe_intermediate_size": 384, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "recurrent": (
        "Mamba2ForCausalLM",
        {"hidden_size": 768, "num_hidden_layers": 12, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1,
         "expand": 2, "conv_kernel": 4},
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """|predicted ÷ measured − 1| of steps, and how many times as long as measured the median step was predicted."""

    num_steps: int
    median: float
    p90: float
    ratio: float

    @classmethod
    def of(cls, ratios: np.ndarray) -> "Errors | None":
        if not ratios.size:
            return None
        middle, p90 = np.quantile(np.abs(ratios - 1), (0.5, 0.9)).tolist()
        return cls(num_steps=ratios.size, median=middle, p90=p90, ratio=float(np.median(ratios)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A model in a format; `calibrated_on` is the model whose steps were fitted. Errors are of all steps and runs."""

    model: str
    format: str
    calibrated_on: str
    provenance: str
    unfitted: list[str]
    median_step_ms: float
    all: Errors
    repeated: Errors
    typical: Errors
    undisturbed: Errors | None
    decode: Errors | None
    with_prompts: Errors | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictReport(Report):
    """All cells."""

    steps: int
    runs: int
    cells: list[Cell]


@contextmanager
def folder_of(model: str) -> Iterator[str]:
    """Give the folder of a model, made here where it is one of RANDOM."""
    if model not in RANDOM:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        kind, sizes = RANDOM[model]
        more = SHARED if model == "recurrent" else SHARED | ATTENTION
        write_random(Path(folder), kind, **sizes, **more)
        yield folder


def config_of(folder: str, scheme: str, threads: int) -> EngineConfig:
    """The configuration of a cell."""
    limits = {"max_num_seqs": MAX_SEQUENCES, "max_num_batched_tokens": MAX_TOKENS, "max_model_len": 1024}
    off = {"enable_prefix_caching": False, "tuning": "default"}
    return EngineConfig.of(folder, num_threads=threads, **limits, **off, **FORMATS[scheme])


def run(config: EngineConfig, num_steps: int, journal: Path) -> list[int]:
    """Run steps of mixed work; return how often a core was taken from this process in each."""
    random, under_way, taken = np.random.default_rng(0), set[str](), list[int]()

    def deliver(deltas: list[OutputDelta]) -> None:
        under_way.difference_update(delta.request_id for delta in deltas if delta.finish is not None)

    engine = build_engine(replace(config, journal=str(journal)), deliver)
    requests: list[Request] = []  # made before: that takes as long as a step
    for number in range(MAX_SEQUENCES + num_steps // 4):
        prompt = random.integers(0, engine.spec.vocab_size, int(2 ** random.uniform(2, 9.3))).tolist()
        asked = BenchRequest(prompt=prompt, max_tokens=int(random.integers(*OUTPUTS)))
        requests.append(replace(greedy_requests([asked], run=number)[0], request_id=f"request-{number}"))
    coming, sequences = iter(requests), cycle(SEQUENCES)
    wanted = next(sequences)
    while len(taken) < num_steps or under_way:
        if len(taken) < num_steps and len(taken) % max(1, num_steps // len(SEQUENCES)) == 0:
            wanted = next(sequences)
        while len(under_way) < wanted and len(taken) < num_steps:
            request = next(coming)
            under_way.add(request.request_id)
            engine.loop.submit(request)
        before, steps = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, engine.loop.journal.steps.num_written
        engine.loop.step()
        if engine.loop.journal.steps.num_written > steps:
            taken.append(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before)
    engine.loop.close()
    return taken


def cell(names: tuple[str, str, str], config: EngineConfig, fitted: EngineConfig, options: argparse.Namespace) -> Cell:
    """Calibrate, run steps, and compare each with its price; `names`: model, format and what is calibrated."""
    machines: list[SimulatedMachine] = []
    runs: list[list[tuple[Load, Behind, float]]] = []
    taken: list[list[int]] = []
    for _ in range(options.runs):
        calibrate(fitted)
        machines.append(simulated_machine(config))
        with tempfile.TemporaryDirectory() as folder:
            journal = Path(folder) / "journal"
            taken.append(run(config, options.steps, journal)[WARM:])
            runs.append(list(read_recording(journal).timed())[WARM:])
    loads, behind, _ = zip(*runs[0])
    assert all([load for load, *_ in each] == list(loads) for each in runs), "runs are seeded and greedy"
    measured_RN = np.array([[seconds for *_, seconds in each] for each in runs])
    predicted_RN = np.array([[m.step_time.seconds(*each) for each in zip(loads, behind)] for m in machines])
    ratios_RN = predicted_RN / measured_RN
    decodes = np.array([load.num_tokens == len(load.spans) for load in loads])
    others_RN = [np.delete(measured_RN, number, axis=0) for number in range(options.runs)]
    everything, typical = (
        Errors.of(ratios_RN),
        Errors.of(np.median(predicted_RN, axis=0) / np.median(measured_RN, axis=0)),
    )
    repeated = Errors.of(np.concatenate([others / one for one, others in zip(measured_RN, others_RN)]))
    assert everything is not None and typical is not None and repeated is not None
    model, scheme, calibrated_on = names
    return Cell(
        model=model,
        format=scheme,
        calibrated_on=calibrated_on,
        provenance=machines[-1].provenance,
        unfitted=sorted(machines[-1].step_time.unfitted),
        median_step_ms=1e3 * float(np.median(measured_RN)),
        all=everything,
        repeated=repeated,
        typical=typical,
        undisturbed=Errors.of(ratios_RN[np.array(taken) == 0]),
        decode=Errors.of(ratios_RN[:, decodes]),
        with_prompts=Errors.of(ratios_RN[:, ~decodes]),
    )


def show(report: PredictReport) -> None:
    """Print a row for each cell."""
    columns = "steps", "step, ms", "error p50", "p90", "repeated", "typical", "undisturbed", "decode", "prompts"
    table = Table("model", "weights", "fitted on", *columns)
    for each in report.cells:
        others = (each.repeated, each.typical, each.undisturbed, each.decode, each.with_prompts)
        texts = ("" if e is None else f"{e.median:.1%} {e.p90:.1%} n={e.num_steps} ×{e.ratio:.2f}" for e in others)
        found = str(each.all.num_steps), f"{each.median_step_ms:.2f}", f"{each.all.median:.1%}", f"{each.all.p90:.1%}"
        table.add_row(each.model, each.format, each.calibrated_on, *found, *texts)
    Console(width=200).print(table)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5, help="of the same steps, at least 2")
    parser.add_argument("--held-out", nargs="+", default=[])
    options = parser.parse_args()
    if options.steps <= WARM or options.runs < 2:
        parser.error(f"--steps must be more than {WARM}, which warm up, and --runs at least 2")
    ceilings(find_native())
    cells: list[Cell] = []
    for scheme in options.formats:
        for model in (options.model, *options.held_out):
            with folder_of(model) as folder, folder_of(options.model) as other:
                config, fitted = (config_of(each, scheme, options.threads) for each in (folder, other))
                names = Path(model).name, scheme, Path(options.model).name
                cells.append(cell(names, config, fitted, options))
    name = f"predict-{Path(options.model).name}"
    report = PredictReport(name=name, steps=options.steps, runs=options.runs, cells=cells)
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
