"""Plan a server: which options meet an objective on a machine, and why not others. Each candidate is simulated.

Searched are precision, as far as it is allowed to lose, sequences at once, tokens a step and, where it is said how
often they are right, drafts: what decides most. A plan must hold where steps take a tenth longer. No torch.
"""

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ridgeline.bench.arrivals import Arrivals, greedy_requests
from ridgeline.bench.load import Load
from ridgeline.bench.metrics import Results, within_ms
from ridgeline.bench.record import RunLog
from ridgeline.bench.workload import BenchRequest
from ridgeline.core.config import EngineConfig, KvDtype
from ridgeline.core.errors import ConfigError
from ridgeline.core.options import table
from ridgeline.core.slo import Slo, parse_slos
from ridgeline.engine.build import build_engine
from ridgeline.explain.drafting import SimulatedDrafts, simulated_drafts
from ridgeline.explain.exploration import Provenance, frame, html_table
from ridgeline.explain.machine import THIS_MACHINE, SimulatedMachine, simulated_machine
from ridgeline.explain.simulation import requests_of, run_simulated
from ridgeline.program.pricing import Load as StepLoad

LOSSES = ("int8", "int4", "kv-int8", "kv-fp8", "kv-int4")
SEQUENCES = (4, 8, 16, 32, 64, 128)
BUDGETS = (128, 256, 512, 1024, 2048)
SLOWER = 1.1
SHARE = 0.95  # of the requests, which must meet every objective
SAME = 0.02  # of throughput: less is no reason to change an option
HEAD = ("", "output tokens/s", "requests that meet all", "TTFT p50, ms", "TPOT p50, ms")
SEARCHED = {"--max-num-seqs": "max_num_seqs", "--max-num-batched-tokens": "max_num_batched_tokens"}
LOSSY = {"--quantize", "--kv-dtype"}
DRAFTS = "--speculate"
WITHOUT = {DRAFTS: "off"}
VERIFIED = 0.15


@dataclass(frozen=True, slots=True)
class Candidate:
    """Holds one configuration with what was simulated of it.

    `attainment` is that of steps a tenth slower, as is `within_ms`: what SHARE of them keep to, by objective.
    """

    machine: SimulatedMachine
    changes: Mapping[str, str]
    results: Results
    attainment: float
    within_ms: Sequence[float]
    provenance: Provenance

    @property
    def config(self) -> EngineConfig:
        return self.machine.setup.config

    @property
    def name(self) -> str:
        """The options that are not the defaults, as they are typed."""
        return " ".join(f"{flag} {value}" for flag, value in self.changes.items()) or "the defaults"

    @property
    def tokens_per_s(self) -> float:
        return self.results.output_throughput_tok_per_s

    @property
    def tpot_ms(self) -> float:
        """The time per output token that half of the requests stay within; 0 where all have one token."""
        found = self.results.latencies.tpot_ms
        return 0.0 if found is None else found.p50

    def line(self) -> Sequence[str]:
        """Return the cells of a row with the columns HEAD."""
        found = self.results.latencies
        medians = ("unknown" if each is None else f"{each.p50:,.1f}" for each in (found.ttft_ms, found.tpot_ms))
        return self.name, f"{self.tokens_per_s:,.1f}", f"{self.attainment:.0%}", *medians


@dataclass(frozen=True, slots=True)
class Plan:
    """Holds the chosen configuration, why each of its options, and the front that no other candidate beats."""

    model: str
    machine: str
    slos: Sequence[Slo]
    chosen: Candidate
    given: Sequence[str]  # options that are not searched and not the defaults, as they are typed
    reasons: Sequence[str]
    front: Sequence[Candidate]
    candidates: Sequence[Candidate]

    @property
    def memory(self) -> Mapping[str, int]:
        """The bytes that the chosen configuration takes."""
        machine = self.chosen.machine
        return {"weights": machine.plan.weight_bytes, "kv_cache": machine.setup.layout.total_bytes}

    @property
    def is_met(self) -> bool:
        """Whether SHARE of the requests meet all objectives, also where steps are a tenth slower."""
        return self.chosen.attainment >= SHARE

    @property
    def sentence(self) -> str:
        """The plan in words."""
        wanted, chosen = ", ".join(_objective(slo.metric, slo.limit_ms) for slo in self.slos), self.chosen
        name, found = Path(self.model).name, f"{chosen.tokens_per_s:,.1f} output tokens/s"
        if self.slos:
            found += f", {chosen.attainment:.0%} of requests within all"
        if self.is_met:
            wanted = wanted or "the highest throughput"
            return f"For {wanted} of {name} on {self.machine}: serve with {chosen.name}: {found}."
        reached = ", ".join(_objective(slo.metric, each) for slo, each in zip(self.slos, chosen.within_ms))
        return (
            f"No configuration searched meets {wanted} for {SHARE:.0%} of the requests to {name} on "
            f"{self.machine}. The nearest is {chosen.name}, predicted {reached} for as many: {found}."
        )

    @property
    def command(self) -> str | None:
        """The command that serves so; None where nothing meets the objectives."""
        options = itertools.chain(self.given, *self.chosen.changes.items())
        return shlex.join(["ridgeline", "serve", self.model, *options]) if self.is_met else None

    def as_json(self) -> Mapping[str, Any]:
        """Return everything as plain data."""

        def plain(found: Candidate) -> Mapping[str, Any]:
            within = {slo.metric: each for slo, each in zip(self.slos, found.within_ms)}
            figures = {"attainment": found.attainment, "within_ms": within, "provenance": found.provenance}
            return {"options": found.changes, "results": found.results} | figures

        return {
            "sentence": self.sentence,
            "command": self.command,
            "is_met": self.is_met,
            "chosen": plain(self.chosen),
            "reasons": self.reasons,
            "front": [plain(each) for each in self.front],
            "memory_bytes": self.memory,
            "points": [(each.name, each.tokens_per_s, each.tpot_ms, each.attainment) for each in self.candidates],
            "num_candidates": len(self.candidates),
        }

    def to_pandas(self) -> Any:
        """Return a record for each candidate as a pandas.DataFrame. Raises ConfigError without pandas."""
        return frame([dict(zip(("options", *HEAD[1:]), each.line())) for each in self.candidates])

    def _repr_html_(self) -> str:
        return html_table(f"{self.sentence} [{self.chosen.provenance}]", HEAD, [each.line() for each in self.front])


def plan(
    config: EngineConfig | str,
    requests: Sequence[BenchRequest] | str,
    *,
    slos: Sequence[Slo] | str = (),
    hardware: str = THIS_MACHINE,
    allow: Sequence[str] = (),
    max_concurrency: int | None = None,
    sequences: Sequence[int] | None = None,
    budgets: Sequence[int] | None = None,
    acceptance: Sequence[float] = (),
) -> Plan:
    """Search the configuration that serves `requests` within `slos`, such as ttft=500ms, or at the highest throughput.

    A workload's name stands for its requests, all at once; `allow` names what may lose quality: LOSSES. `sequences` at
    once and `budgets` of tokens a step are those to try; with what `speculate` drafts, right as often as `acceptance`
    says (see `simulate`), and without. Raises ConfigError for objectives below what one step takes.
    """
    config = EngineConfig.of(config) if isinstance(config, str) else config
    drafting, config = config.speculation, _without_drafts(config)
    requests = requests_of(config, requests, None, Load()) if isinstance(requests, str) else requests
    slos = parse_slos(slos) if isinstance(slos, str) else slos
    if wrong := [name for name in allow if name not in LOSSES]:
        raise ConfigError(f"allow names what may lose quality: {', '.join(LOSSES)}; got {wrong[0][:40]!r}")
    if not requests:
        raise ConfigError("the workload holds no requests, and a plan is made for some")
    candidates, impossible = list[Candidate](), list[ConfigError]()
    for precise, flags in _precisions(config, allow):
        try:
            machine = simulated_machine(precise, hardware)
            drafts = simulated_drafts(replace(precise, speculation=drafting), machine, hardware, tuple(acceptance))
            check_floor(machine, [slo for slo in slos if drafts is None or slo.metric != "tpot"])
        except ConfigError as error:
            impossible.append(error)
            continue
        ways = [(None, {})] if drafts is None else [(None, WITHOUT), (drafts, {DRAFTS: str(drafting.speculate)})]
        for (seqs, budget), (way, how) in itertools.product(_sizes(requests, sequences, budgets), ways):
            limits = replace(precise.scheduler, max_num_seqs=seqs, max_num_batched_tokens=budget)
            try:
                asked = replace(precise, scheduler=limits, speculation=precise.speculation if way is None else drafting)
                sized = machine.with_config(asked, way and way.price.beside)
                candidates.append(_candidate(sized, flags | how, requests, slos, max_concurrency, way))
            except ConfigError as error:
                if (seqs, budget) == _standard_sizes() and way is None:
                    raise
                impossible.append(error)  # the cache has no room for it
    if not candidates:
        raise impossible[-1]
    chosen = _choose(candidates, slos)
    return Plan(
        model=config.model.model,
        machine=chosen.machine.name,
        slos=slos,
        chosen=chosen,
        given=_given(config),
        reasons=_reasons(chosen, candidates, slos),
        front=_front(candidates),
        candidates=candidates,
    )


def run_here(config: EngineConfig, requests: Sequence[BenchRequest], max_concurrency: int | None = None) -> RunLog:
    """Run a configuration here, in this process, after a request that warms up."""
    arrivals = Arrivals()
    engine = build_engine(config, arrivals.deliver)
    arrivals.run(engine.loop, greedy_requests([BenchRequest(prompt=[5] * 32, max_tokens=8)], run=1))
    return arrivals.run(engine.loop, greedy_requests(requests), max_concurrency)


def compared(plan: Plan, measured: Results) -> Sequence[tuple[str, float, float]]:
    """Return (figure, predicted, measured) of the figures that a plan promises."""
    sides = (plan.chosen.results, measured)
    rows = [("output tokens/s", sides[0].output_throughput_tok_per_s, sides[1].output_throughput_tok_per_s)]
    for name in ("ttft_ms", "tpot_ms"):
        one, other = (getattr(side.latencies, name) for side in sides)
        if one is not None and other is not None:
            rows.append((f"{name.removesuffix('_ms').upper()} p50, ms", one.p50, other.p50))
    return rows


def check_floor(machine: SimulatedMachine, slos: Sequence[Slo]) -> None:
    """Raise ConfigError for an objective that one sequence alone cannot meet."""
    floor_ms = 1e3 * machine.step_time.seconds(StepLoad.decode(1, 1))
    for slo in slos:
        if slo.limit_ms < floor_ms:
            raise ConfigError(
                f"{slo.metric} within {slo.limit_ms:g} ms cannot be: one step of {machine.model} on {machine.name} "
                f"takes {floor_ms:.3g} ms [{machine.provenance}]; relax it, allow int8 or int4, or take another machine"
            )


def _precisions(config: EngineConfig, allow: Sequence[str]) -> list[tuple[EngineConfig, dict[str, str]]]:
    schemes = [None, *(name for name in ("int8", "int4") if name in allow and config.quantize.scheme is None)]
    few_bits: Sequence[KvDtype] = ("int8", "fp8", "int4") if config.cache.kv_dtype == "auto" else ()
    kinds: list[KvDtype] = ["auto", *(name for name in few_bits if f"kv-{name}" in allow)]
    found: list[tuple[EngineConfig, dict[str, str]]] = []
    for scheme, kind in itertools.product(schemes, kinds):
        changed, flags = config, dict[str, str]()
        if scheme is not None:
            changed, flags["--quantize"] = replace(changed, quantize=replace(config.quantize, scheme=scheme)), scheme
        if kind != "auto":
            changed, flags["--kv-dtype"] = replace(changed, cache=replace(config.cache, kv_dtype=kind)), kind
        found.append((changed, flags))
    return found


def _without_drafts(config: EngineConfig) -> EngineConfig:
    """Return a configuration without the drafts that are searched; off stays as it was asked for."""
    given = config.speculation
    return replace(config, speculation=replace(given, speculate=None)) if given.proposers() else config


def _standard_sizes() -> tuple[int, int]:
    limits = EngineConfig.of("any").scheduler
    return limits.max_num_seqs, limits.max_num_batched_tokens


def _sizes(
    requests: Sequence[BenchRequest], sequences: Sequence[int] | None, budgets: Sequence[int] | None
) -> list[tuple[int, int]]:
    """Return the sequences at once and tokens a step to try: those given, or the usual ones that are of use."""
    longest = max(len(request.prompt) + request.max_tokens for request in requests)
    most = 2 * len(requests), 4 * longest

    def is_of_use(size: tuple[int, int]) -> bool:
        fits = (sequences or size[0] <= most[0]) and (budgets or size[1] <= most[1])
        return size[0] <= size[1] and (size == _standard_sizes() or bool(fits))

    return list(filter(is_of_use, itertools.product(sequences or SEQUENCES, budgets or BUDGETS)))


def _candidate(
    machine: SimulatedMachine,
    flags: Mapping[str, str],
    requests: Sequence[BenchRequest],
    slos: Sequence[Slo],
    max_concurrency: int | None,
    drafts: SimulatedDrafts | None,
) -> Candidate:
    scheduler, standard = machine.setup.config.scheduler, EngineConfig.of("any").scheduler
    changes = dict(flags)
    for flag, field in SEARCHED.items():
        if getattr(scheduler, field) != getattr(standard, field):
            changes[flag] = str(getattr(scheduler, field))
    run = partial(run_simulated, machine, requests, slos=slos, max_concurrency=max_concurrency, drafts=drafts)
    found, attainment, within = run(), 1.0, list[float]()
    if slos:
        slow = run(pace=lambda _, seconds: SLOWER * seconds)
        assert slow.results.goodput is not None
        attainment = slow.results.goodput.attainment
        within = [within_ms(slow.log, slo.metric, SHARE) for slo in slos]
    return Candidate(machine, changes, found.results, attainment, within, found.provenance)


def _given(config: EngineConfig) -> Sequence[str]:
    typed: list[str] = []
    for row in table(EngineConfig):
        value = getattr(getattr(config, row.part) if row.part else config, row.field)
        if value == row.default or row.flag in SEARCHED:
            continue
        if row.type is bool:
            typed.append(row.flag if value else f"--no-{row.flag.removeprefix('--')}")
        elif row.field == "adapters":
            typed += [word for name, path in config.adapters.items() for word in (row.flag, f"{name}={path}")]
        else:
            typed += [row.flag, str(value)]
    return typed


def _objective(metric: str, limit_ms: float) -> str:
    return f"{metric} within {limit_ms:.4g} ms"


def _choose(candidates: Sequence[Candidate], slos: Sequence[Slo]) -> Candidate:
    """Return the fastest of those that meet all objectives, among equals the one with the fewest changes."""
    good = [each for each in candidates if each.attainment >= SHARE]
    if not good:
        return max(candidates, key=lambda each: (each.attainment, each.tokens_per_s))
    if slos:  # nothing is lost for more than was asked for
        good = [each for each in good if not LOSSY & each.changes.keys()] or good
    most = max(each.tokens_per_s for each in good)
    equal = [each for each in good if each.tokens_per_s >= (1 - SAME) * most]
    return min(equal, key=lambda each: (len(each.changes), -each.tokens_per_s))


def _reasons(chosen: Candidate, candidates: Sequence[Candidate], slos: Sequence[Slo]) -> Sequence[str]:
    """Say what the nearest other value of each option would have given, all else equal."""
    options = sorted({flag for each in candidates for flag in each.changes})
    sentences: list[str] = []
    for flag in options:
        others = [each for each in candidates if _without(each, flag) == _without(chosen, flag) and each is not chosen]
        if not others:
            continue
        other = max(others, key=lambda each: (each.attainment >= SHARE, each.tokens_per_s))
        gain = other.tokens_per_s / chosen.tokens_per_s - 1
        met = f", {other.attainment:.0%} against {chosen.attainment:.0%} of requests within all" if slos else ""
        mine, its = (each.changes.get(flag, "the default") for each in (chosen, other))
        sentences.append(f"{flag} {mine}, not {its}: {gain:+.1%} output tokens/s{met}")
    return sentences


def _without(candidate: Candidate, flag: str) -> Mapping[str, str]:
    return {name: value for name, value in candidate.changes.items() if name != flag}


def _front(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Return the candidates that no other beats in throughput and in TPOT, the fastest first."""
    front: list[Candidate] = []
    for each in sorted(candidates, key=lambda each: (-each.tokens_per_s, each.tpot_ms, len(each.changes))):
        if not front or each.tpot_ms < front[-1].tpot_ms:
            front.append(each)
    return front
