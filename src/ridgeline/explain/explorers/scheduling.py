"""Compare static and continuous batching: one batch after the other, and slots filled anew, in the scheduler."""

from collections.abc import Sequence

from ridgeline.bench.workload import BenchRequest
from ridgeline.core.config import EngineConfig
from ridgeline.explain.exploration import Figure, Found, Grid
from ridgeline.explain.machine import simulated_machine
from ridgeline.explain.simulation import Simulation, run_simulated

SHOWN = 48  # steps
PROMPT_TOKENS = 16


def explore(
    slots: int = 4,
    requests: int = 16,
    short: int = 4,
    long: int = 16,
    model: str = "llama-3-8b",
    card: str = "h100-sxm",
) -> Found:
    """Run outputs of two lengths in turns: all at once, and so many at a time as there are slots."""
    machine = simulated_machine(EngineConfig.of(model, max_num_seqs=slots), card)
    asked = [BenchRequest(prompt=[i] * PROMPT_TOKENS, max_tokens=(short, long)[i % 2]) for i in range(requests)]
    continuous = [run_simulated(machine, asked)]
    static = [run_simulated(machine, asked[i : i + slots]) for i in range(0, requests, slots)]
    tokens = sum(request.max_tokens for request in asked)
    figures: list[Figure] = []
    for name, runs in (("static", static), ("continuous", continuous)):
        seconds, steps = sum(run.log.duration_s for run in runs), sum(run.num_steps for run in runs)
        busy = tokens / (slots * steps)
        figures.append(Figure(f"{name}_time", seconds, "s", f"of {steps:,} steps, simulated", machine.provenance))
        figures.append(Figure(f"{name}_busy", busy, "share", f"{tokens:,} ÷ ({slots:,} · {steps:,} steps)", "counted"))
    gain = sum(run.log.duration_s for run in static) / continuous[0].log.duration_s
    figures.append(Figure("gain", gain, "×", "static ÷ continuous", machine.provenance))
    sentence = (
        f"Filling a slot as soon as it is free makes {requests:,} outputs {gain:.2f}× as fast: slots are "
        f"{figures[3].text} busy instead of {figures[1].text}."
    )
    return sentence, figures, (_grid("static", slots, static), _grid("continuous", slots, continuous))


def _grid(name: str, slots: int, runs: Sequence[Simulation]) -> Grid:
    """Put what ran in each step into slots: a sequence stays where it began."""
    columns: list[list[int | None]] = []
    for number, run in enumerate(runs):
        spans, held = run.recording.spans["seq_id"], list[int | None]([None] * slots)
        for step in run.recording.steps[:SHOWN]:
            running = spans[step["first_span"] :][: step["num_spans"]] + number * slots
            held = [seq if seq in running else None for seq in held]
            for seq in running:
                if seq not in held:
                    held[held.index(None)] = int(seq)
            columns.append(held)
    rows = list(zip(*columns[:SHOWN]))
    cells = [["" if seq is None else str(seq) for seq in row] for row in rows]
    kinds = ["".join("." if seq is None else str(seq % 8) for seq in row) for row in rows]
    lines = [(f"slot {i}", cells[i], kinds[i]) for i in range(min(slots, 16))]
    return Grid(f"{name}: the request in each slot, step by step", lines)
