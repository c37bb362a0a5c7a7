"""Write what the pages show without a server's help: simulated runs, the numbers of texts, explorers at their stops.

Usage: python tools/pages_data.py [--check]. Without --check it writes `src/ridgeline/server/ui/data-*.js`; with it, it
only says whether they are what would be written. Everything follows from datasheets: it is the same on all machines.
"""

import argparse
import contextlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numbers_page import TEXTS

from ridgeline.bench.load import Load
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.step import StepPlan
from ridgeline.cost import datasheets
from ridgeline.cost.datasheets import datasheet
from ridgeline.engine.journal import WAIT_REASONS, Records
from ridgeline.explain import explorers, lectures
from ridgeline.explain.lectures.row import STATUSES, Row
from ridgeline.explain.limits import MODELS
from ridgeline.explain.machine import simulated_machine
from ridgeline.explain.practice import questions
from ridgeline.explain.simulation import Simulation, requests_of, run_simulated

UI = Path(__file__).resolve().parents[1] / "src" / "ridgeline" / "server" / "ui"
MODEL, CARD = "llama-3-8b", "h100-sxm"
STOPS = (-4, -2, 0, 2, 4)  # of an input: its default times a power of two, or plus so many tenths
DIGITS, DRAWN_DIGITS = 6, 3


@dataclass(frozen=True, slots=True)
class Example:
    """Names a simulated run; `says` what to look at."""

    name: str
    says: str
    workload: str
    options: Mapping[str, object]
    rate_per_s: float | None = None

    def run(self) -> tuple[Simulation, list[list[list[int]]]]:
        """Return the run, and of each step the sequences whose blocks are others than before, with them."""
        load = Load() if self.rate_per_s is None else Load(schedule="poisson", request_rate_per_s=self.rate_per_s)
        config = EngineConfig.of(MODEL, **self.options)
        held: dict[int, list[int]] = {}
        steps: list[list[list[int]]] = []

        def see(plan: StepPlan) -> None:
            now = {span.seq_id: list(table.blocks) for span, table in zip(plan.spans, plan.tables[0], strict=True)}
            steps.append([[seq, *blocks] for seq, blocks in now.items() if held.get(seq) != blocks])
            held.update(now)

        asked = requests_of(config, self.workload, None, load)
        return run_simulated(simulated_machine(config, CARD), asked, see=see), steps

    @property
    def command(self) -> str:
        flags = [f"--{name.replace('_', '-')} {value}" for name, value in self.options.items() if value is not False]
        flags += ["--no-prefix-caching"] if self.options.get("enable_prefix_caching") is False else []
        rate = [] if self.rate_per_s is None else [f"--schedule poisson --rate {self.rate_per_s:g}"]
        return " ".join(
            ["ridgeline simulate", MODEL, f"--hardware {CARD}", f"--workload {self.workload}", *rate, *flags]
        )


_MIXED = "uniform:num_requests=12,input_min=40,input_max=400,output_min=8,output_max=40,seed=1"
_LONG = "uniform:num_requests=8,input_min=30,input_max=2000,output_min=12,output_max=40,seed=4"
_SHARED = "shared_prefix:num_requests=10,num_prefixes=1,prefix_tokens=384,suffix_tokens=24,output_tokens=16"
_TIGHT = "fixed:num_requests=6,input_tokens=96,output_tokens=64"
EXAMPLES = (
    Example(
        "one at a time",
        "A step reads all weights for one token: the others wait.",
        _MIXED,
        {"max_num_seqs": 1},
    ),
    Example(
        "four at a time", "The same requests; each step's weights serve four sequences.", _MIXED, {"max_num_seqs": 4}
    ),
    Example(
        "all twelve at once",
        "The same again: a slot for every request.",
        _MIXED,
        {"max_num_seqs": 16},
    ),
    Example(
        "budget 2,048",
        "Long prompts run whole, and decoding waits for them.",
        _LONG,
        {"max_num_batched_tokens": 2048},
        60,
    ),
    Example(
        "budget 256",
        "The same prompts in chunks: steps stay short.",
        _LONG,
        {"max_num_batched_tokens": 256},
        60,
    ),
    Example(
        "shared prefix, cached", "One system prompt: later requests find it in the cache.", _SHARED, {"max_num_seqs": 4}
    ),
    Example(
        "shared prefix, not cached",
        "The same prompts, each computed again.",
        _SHARED,
        {"max_num_seqs": 4, "enable_prefix_caching": False},
    ),
    Example(
        "too small a cache",
        "Blocks run out while outputs grow: the latest sequence is preempted and computed again.",
        _TIGHT,
        {"kv_cache_bytes": 40 * 16 * 131072, "max_num_seqs": 6},
    ),
)


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """Return plain data with floats of few digits, so that every machine writes the same."""
    if isinstance(value, float):
        return None if value != value else float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {name: rounded(each, digits) for name, each in value.items()}
    return [rounded(each, digits) for each in value] if isinstance(value, list | tuple) else value


def ring(records: Records, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return records in the shape of /explain/steps."""
    names = [name for name in records.dtype.names or () if name not in left_out]
    digits = {"start_s": 5, "run_s": 4}
    rows = [
        [rounded(value, digits.get(name, DIGITS)) for name, value in zip(names, row)] for row in records[names].tolist()
    ]
    return {"first": 0, "fields": names, "rows": rows}


def examples() -> list[dict[str, Any]]:
    """Return the simulated runs."""
    found: list[dict[str, Any]] = []
    for example in EXAMPLES:
        run, blocks = example.run()
        recording = run.recording
        found.append(
            {
                "name": example.name,
                "says": example.says,
                "command": example.command,
                "provenance": run.provenance,
                "wait_reasons": WAIT_REASONS,
                "cache_reasons": recording.cache_reasons,
                "steps": ring(recording.steps, ("plan_s", "batch_s", "sample_s", "commit_s", "render_s", "num_copies")),
                "spans": ring(recording.spans, ("num_final", "adapter")),
                "decisions": ring(recording.decisions),
                "blocks": blocks,
            }
        )
    return found


def numbers() -> dict[str, Any]:
    """Return the rows of the lectures."""
    return {"texts": TEXTS, "statuses": STATUSES, "rows": [shown(row) for row in lectures.rows()]}


def shown(row: Row) -> dict[str, Any]:
    """Return what the page shows of a row."""
    return {name: value for name, value in row.as_json().items() if name not in ("values", "claims")}


def stops(parameter: inspect.Parameter) -> list[Any]:
    """Return values of an input to choose from, its default among them."""
    meta, default = parameter.annotation.__metadata__[0], parameter.default
    choices = getattr(parameter.annotation.__origin__, "__args__", ())
    if choices or isinstance(default, bool) or not isinstance(default, int | float):
        return list(choices) or ([False, True] if isinstance(default, bool) else [default])
    low = meta.ge if meta.ge is not None else default / 16
    high = meta.le if meta.le is not None else default * 16
    values = {default}
    for exponent in STOPS:
        value = default * 2**exponent if default > 1 or isinstance(default, int) else default + exponent * 0.1
        value = int(value) if isinstance(default, int) else round(value, 6)
        if low <= value <= high:
            values.add(value)
    return sorted(values)


def asked() -> dict[str, dict[str, Any]]:
    """Return the questions by their explorers, and the answers as they are shown."""
    return {
        each.explorer: {"ask": each.ask, "answers": [[a.figure.text, a.is_right, a.why] for a in each.answers]}
        for each in questions()
    }


def learn() -> list[dict[str, Any]]:
    """Return each explorer with what it says at its defaults, and with one input at a time at its stops."""
    found: list[dict[str, Any]] = []
    practice = asked()
    for name in explorers.names():
        default = said(name, {})
        inputs = [sweep(name, parameter, default) for parameter in explorers.inputs_of(name).values()]
        words = {"name": name, "summary": explorers.summary(name), "question": practice[name]}
        found.append(words | {"at": default, "inputs": inputs})
    return found


def sweep(name: str, parameter: inspect.Parameter, default: Sequence[Any]) -> dict[str, Any]:
    """Return what an explorer says at each stop of one input that it takes, where it is not what it says first."""
    there: list[Any] = []
    at: list[Any] = []
    for stop in stops(parameter):
        with contextlib.suppress(ConfigError):  # it does not fit the other inputs' defaults
            sentence, *parts = said(name, {parameter.name: stop})
            at.append([sentence, *([changed(*pair) for pair in zip(*both)] for both in zip(parts, default[1:]))])
            there.append(stop)
    words = {"name": parameter.name, "help": parameter.annotation.__metadata__[0].description}
    return words | {"default": parameter.default, "stops": there, "at": at}


def changed(new: Sequence[Any], old: Sequence[Any]) -> Any:
    """Return the items that are others than by default, each at its place, 0 for the others; 0 where all are equal."""
    items = [0 if now == before else now for now, before in zip(new, old, strict=True)]
    while items and items[-1] == 0:
        items.pop()
    return items or 0


def said(name: str, inputs: Mapping[str, Any]) -> list[Any]:
    """Return what an explorer says, short: its sentence, figures, curves with all x before all y, and cells."""
    result = explorers.explore(name, **inputs)
    figures = [[figure.text, figure.formula, figure.name, figure.provenance] for figure in result.figures]
    series = [[[y for _, y in s.points], s.marks, [x for x, _ in s.points], s.name, s.x, s.y] for s in result.series]
    grids = [
        [[[label, "|".join(cells), kinds] for label, cells, kinds in grid.rows], grid.name] for grid in result.grids
    ]
    return [result.sentence, figures, rounded(series, DRAWN_DIGITS), grids]


def plan() -> dict[str, Any]:
    """Return the models and the datasheets that a plan can be asked for."""
    return {"models": list(MODELS), "cards": [[name, datasheet(name).title] for name in datasheets.names()]}


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = 0
    for name, make in (("examples", examples), ("numbers", numbers), ("learn", learn), ("plan", plan)):
        path = UI / f"data-{name}.js"
        data = json.dumps(rounded(make()), ensure_ascii=False, separators=(",", ":"))
        text = f"// Written by: python tools/pages_data.py\nexport default {data};\n"
        if check and (not path.is_file() or path.read_text(encoding="utf-8") != text):
            print(f"{path.name} is not what tools/pages_data.py writes; run it")
            stale += 1
        elif not check:
            path.write_text(text, encoding="utf-8")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
