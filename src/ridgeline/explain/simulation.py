"""Run the engine on a fake clock: the real loop, scheduler, cache and strategy, and an executor that lets time pass.

What is simulated is time. Lengths of outputs are the workload's, and their tokens are all the same one, so prefixes of
equal prompts are shared as greedy outputs would share them; drafts are right as often as is said. No torch.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeline.bench.arrivals import Arrivals, greedy_requests
from ridgeline.bench.load import Load
from ridgeline.bench.metrics import COLUMNS, Results, summarize
from ridgeline.bench.record import RunLog
from ridgeline.bench.workload import BenchRequest
from ridgeline.bench.workloads import parse_workload
from ridgeline.cache.manager import CacheManager
from ridgeline.core.collector import collector_paused
from ridgeline.core.config import Choice, EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.slo import Slo, parse_slos
from ridgeline.core.speculation import SpeculationConfig
from ridgeline.core.step import DraftStats, SampledToken, SampleRow, StepPlan, StepResult
from ridgeline.core.words import counted
from ridgeline.cost.efficiency import Behind
from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.decoding.strategy import Strategy
from ridgeline.engine.journal import planned_load
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.recording import EngineSetup, MemoryRecorder, Recording
from ridgeline.engine.render import Renderer
from ridgeline.engine.scheduler import Scheduler
from ridgeline.explain.drafting import RIGHT, SimulatedDrafts, simulated_drafts
from ridgeline.explain.exploration import Provenance, frame, html_table
from ridgeline.explain.machine import THIS_MACHINE, SimulatedMachine, simulated_machine
from ridgeline.explain.pace import Pace, as_predicted
from ridgeline.weights.folder import ModelFolder

if TYPE_CHECKING:
    from ridgeline.engine.executor import StepObserver

HEAD = ("", *COLUMNS)


class FakeClock:
    """Gives seconds that pass only when they are told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def wait(self, until_s: float) -> None:
        """Let time pass."""
        self.now_s = max(self.now_s, until_s)


class PricedExecutor:
    """Computes nothing: lets `seconds` of a plan pass, and gives every row the token of `token`."""

    def __init__(
        self,
        clock: FakeClock,
        depth: int,
        seconds: Callable[[StepPlan], float],
        token: Callable[[SampleRow], int] = lambda row: RIGHT,
    ) -> None:
        self.depth, self.chains = depth, depth > 1
        self.observer: StepObserver | None = None
        self._clock, self._seconds, self._token = clock, seconds, token
        self.queued: deque[StepPlan] = deque()

    def facts(self) -> Mapping[str, Choice]:
        """Return nothing: no weights are anywhere."""
        return {}

    def submit(self, plan: StepPlan) -> None:
        self.queued.append(plan)

    def collect(self) -> StepResult:
        return self.compute(self.queued.popleft())

    def hurry(self, asked: bool) -> None:
        """Do nothing: a step has one round."""

    def compute(self, plan: StepPlan) -> StepResult:
        self._clock.now_s += self._seconds(plan)
        token = self._token
        return StepResult(plan.step, tuple([SampledToken(row.seq_id, token(row)) for row in plan.samples]))


def simulated_loop(
    setup: EngineSetup,
    executor: PricedExecutor,
    clock: FakeClock,
    deliver: Callable[[list[OutputDelta]], None],
    recorder: MemoryRecorder | None = None,
    strategy: Strategy | None = None,
) -> EngineLoop:
    """Return an engine's loop whose executor is a simulated one; without a `strategy` it decodes token by token."""
    limits, sizes = setup.config.scheduler, (setup.max_model_len, setup.max_num_rows)
    cache = CacheManager(setup.layout, prefix_caching=setup.config.cache.prefix_caching)
    depth, chains = executor.depth, executor.chains
    scheduler = Scheduler(limits, cache, strategy or Autoregressive(), *sizes, clock, depth, chains=chains)
    return EngineLoop(scheduler, executor, Renderer(None), deliver, clock, record=recorder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Holds a simulated run: latencies as `bench` has them, and what the engine did. In a notebook it is a table.

    `provenance` is that of the times; counts are counted. Means are over the time that steps took.
    """

    model: str
    machine: str
    provenance: Provenance
    config: EngineConfig
    results: Results
    log: RunLog
    recording: Recording
    num_preemptions: int
    num_steps: int
    mean_running: float
    max_running: int
    mean_waiting_share: float
    kv_mean_share: float
    kv_peak_share: float
    busy_share: float
    drafts: DraftStats

    @property
    def sentence(self) -> str:
        """The run in words."""
        found = self.results
        return (
            f"{counted(found.completed, 'request')} to {self.model} on {self.machine}: "
            f"{found.output_throughput_tok_per_s:,.1f} output tokens/s, "
            f"{found.request_throughput_per_s:,.3g} requests/s, "
            f"{counted(self.num_steps, 'step')} of {self.mean_running:.1f} sequences, KV cache up to "
            f"{self.kv_peak_share:.0%} full, {counted(self.num_preemptions, 'preemption')}, "
            f"{found.cached_prompt_tokens:,} of {found.prompt_tokens:,} prompt tokens cached{self._drafted()}."
        )

    def _drafted(self) -> str:
        drafted, accepted = self.drafts.num_draft_tokens, self.drafts.num_accepted_tokens
        return f", {accepted:,} of {drafted:,} drafted tokens accepted" if drafted else ""

    def lines(self) -> Sequence[Sequence[str]]:
        """Return the cells of a table of latencies in milliseconds, with the columns HEAD."""
        found = self.results.latencies
        rows = (("TTFT", found.ttft_ms), ("TPOT", found.tpot_ms), ("ITL", found.itl_ms), ("E2E latency", found.e2el_ms))
        return [(f"{name}, ms", *values.cells()) for name, values in rows if values is not None]

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        names = ("model", "machine", "provenance", "num_preemptions", "num_steps", "mean_running", "max_running")
        shares = ("mean_waiting_share", "kv_mean_share", "kv_peak_share", "busy_share")
        plain = {name: getattr(self, name) for name in (*names, *shares)} | {"drafts": self.drafts._asdict()}
        return plain | {"results": asdict(self.results), "sentence": self.sentence}

    def to_pandas(self) -> Any:
        """Return a record for each request as a pandas.DataFrame. Raises ConfigError without pandas."""
        names = ("arrival_s", "ttft_s", "tpot_s", "e2el_s", "prompt_tokens", "cached_tokens", "output_tokens")
        good = (record for record in self.log.records if record.error is None)
        return frame([{name: getattr(record, name) for name in names} for record in good])

    def _repr_html_(self) -> str:
        return html_table(f"{self.sentence} [{self.provenance}]", HEAD, self.lines())


def simulate(
    config: EngineConfig | str,
    *,
    workload: str = "fixed",
    trace: Path | str | None = None,
    load: Load | None = None,
    hardware: str = THIS_MACHINE,
    goodput: str = "",
    acceptance: Sequence[float] = (),
    **options: object,
) -> Simulation:
    """Run a workload on `this` machine or a datasheet: of a configuration, or of a model with `options` of an engine.

    `trace` is a file at its own times instead of a `workload`; `load` says when requests come, all at once without it;
    `goodput` has objectives such as ttft=500ms,tpot=50ms. A token that `speculate` drafts behind right ones is right
    with the chance that `acceptance` has for its position in a draft, the last one for all behind.
    Raises ConfigError for what cannot be.
    """
    if isinstance(config, str):
        config = EngineConfig.of(config, **options)
    slos = parse_slos(goodput)
    requests = requests_of(config, workload, None if trace is None else Path(trace), load or Load())
    limit = load.max_concurrency if load is not None else None
    machine = simulated_machine(replace(config, speculation=SpeculationConfig()), hardware)
    drafts = simulated_drafts(config, machine, hardware, tuple(acceptance))
    if drafts is not None:
        machine = machine.with_config(config, drafts.price.beside)
    return run_simulated(machine, requests, slos=slos, max_concurrency=limit, drafts=drafts)


def requests_of(config: EngineConfig, workload: str, trace: Path | None, load: Load) -> list[BenchRequest]:
    """Return the requests of a workload or a trace, in order of arrival, prompts as token ids.

    Raises ConfigError for a workload that is not there or broken, and for text where the model has no tokenizer.
    """
    if trace is not None:
        kinds = {".csv": "azure", ".jsonl": "mooncake"}
        if trace.suffix not in kinds:
            raise ConfigError(f"{trace} is neither a .csv of Azure's trace nor a .jsonl of Mooncake's")
        workload, load = f"{kinds[trace.suffix]}:path={trace}", replace(load, schedule="trace", request_rate_per_s=None)
    requests = load.schedule_requests(parse_workload(workload).requests())
    texts = [request.prompt for request in requests if isinstance(request.prompt, str)]
    if not texts:
        return requests
    tokenizer = ModelFolder.open(config.model.model, config.model.revision).text_tokenizer()
    return [replace(r, prompt=tokenizer.encode(r.prompt)) if isinstance(r.prompt, str) else r for r in requests]


class _InTurn:
    """Predicts what each plan of a run takes, by what is around it."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._seconds = machine.step_time.mean_seconds
        self._behind, self._last, self._num_tokens = Behind(0), set[int](), 0

    def __call__(self, plan: StepPlan, queued: Sequence[StepPlan]) -> float:
        """Return the seconds of the next plan, behind which others are `queued`."""
        last, known = self._last, self._behind
        seq_ids = last if plan.follows else {span.seq_id for span in plan.spans}
        plans = len(queued) > 0 and not queued[0].follows
        age, before = (known.age + 1, known.tokens) if plan.follows else (0, self._num_tokens)
        asked = planned_load(plan)
        self._behind = Behind(age, not last <= seq_ids, plans, len(seq_ids - last), before)
        self._last, self._num_tokens = seq_ids, asked.num_tokens
        return self._seconds(asked, self._behind)


@collector_paused()
def run_simulated(
    machine: SimulatedMachine,
    requests: Sequence[BenchRequest],
    *,
    slos: Sequence[Slo] = (),
    max_concurrency: int | None = None,
    think_s: float = 0.0,
    pace: Pace = as_predicted,
    see: Callable[[StepPlan], object] = lambda plan: None,
    drafts: SimulatedDrafts | None = None,
    cached: Sequence[Sequence[int]] = (),
) -> Simulation:
    """Run requests, in order of arrival, on a machine whose steps take what `pace` makes of begin and prediction.

    `see` is shown each plan as it runs: its block tables are gone afterwards. `cached` are prompts that were computed
    before all requests, which takes no time.
    Raises ConfigError for a request that the context has no room for.
    """
    setup = machine.setup
    for number, request in enumerate(requests):
        if len(request.prompt) + request.max_tokens > setup.max_model_len:
            raise ConfigError(
                f"request {number} has {len(request.prompt)} tokens and asks for {request.max_tokens} more, and the "
                f"context is {setup.max_model_len}: raise --max-model-len, or shrink the workload, as "
                "--workload azure:path=FILE,length_scale=0.1 does"
            )
    clock, recorder, is_begun = FakeClock(), MemoryRecorder(setup), False
    arrivals = Arrivals(clock, clock.wait)
    predicted_s = _InTurn(machine)

    def seconds(plan: StepPlan) -> float:
        if not is_begun:
            return 0.0
        see(plan)
        drafting_s = 0.0 if drafts is None else drafts.seconds(plan)
        return pace(clock.now_s, drafting_s + predicted_s(plan, executor.queued))

    executor = PricedExecutor(clock, machine.setup.depth, seconds)
    strategy = Autoregressive() if drafts is None else drafts.strategy(clock)
    loop = simulated_loop(setup, executor, clock, arrivals.deliver, recorder, strategy)
    arrivals.run(loop, greedy_requests([BenchRequest(prompt=list(ids), max_tokens=1) for ids in cached]))
    is_begun = True
    log = arrivals.run(loop, greedy_requests(requests), max_concurrency, think_s)
    drafted = next(iter((strategy.drafts() or {}).values()), DraftStats())
    return _simulation(machine, log, recorder.recording(loop.journal), drafted, slos)


def _simulation(
    machine: SimulatedMachine, log: RunLog, recording: Recording, drafts: DraftStats, slos: Sequence[Slo]
) -> Simulation:
    setup, steps = machine.setup, recording.steps
    run_s, running = steps["run_s"], steps["num_spans"]
    used = np.max([steps[f"used_{i}"] / g.num_blocks for i, g in enumerate(setup.layout.groups)], axis=0)
    total_s = float(run_s.sum()) or 1.0
    return Simulation(
        model=machine.model,
        machine=machine.name,
        provenance=machine.provenance,
        config=setup.config,
        results=summarize(log, slos),
        log=log,
        recording=recording,
        num_preemptions=int((recording.decisions["kind"] == 1).sum()),
        num_steps=len(steps),
        mean_running=float((running * run_s).sum()) / total_s,
        max_running=int(running.max(initial=0)),
        mean_waiting_share=float(run_s[steps["head_waits"] > 0].sum()) / total_s,
        kv_mean_share=float((used * run_s).sum()) / total_s,
        kv_peak_share=float(used.max(initial=0.0)),
        busy_share=total_s / log.duration_s if log.duration_s else 0.0,
        drafts=drafts,
    )
