"""Plan a server at its start: what of its options was left open takes the values that meet objectives at the most load.

The load is chats that come at random, as many a second as keep a number of sequences busy. Must not import torch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ridgeline.bench.load import Load
from ridgeline.bench.workload import BenchRequest
from ridgeline.bench.workloads.fixed import Fixed
from ridgeline.core.config import Choice, EngineConfig
from ridgeline.core.log import get_logger
from ridgeline.core.slo import Slo
from ridgeline.explain.machine import SimulatedMachine, simulated_machine
from ridgeline.explain.planner import SLOWER, Plan, check_floor, plan
from ridgeline.program.pricing import Load as StepLoad

log = get_logger("plan")

USERS = (64, 32, 16, 8, 4, 2, 1)  # sequences at once
BUDGETS = (256, 512, 1024)  # tokens a step: few, since a start waits for it
CHAT_TOKENS = (512, 128)  # in and out, where the context has room
UTILIZATION = 0.8
MIN_REQUESTS = 24


def planned(config: EngineConfig, slos: Sequence[Slo], open_options: Collection[str]) -> EngineConfig:
    """Return the configuration with those of `open_options` chosen for `slos`, each a Choice; as it is where none do.

    Raises ConfigError for objectives below the time of a step, and for what cannot be simulated.
    """
    if config.speculation.proposers():
        log.warning("nothing is planned for --slo: speculate=%s cannot be simulated yet", config.speculation.speculate)
        return config
    machine, limits, why_not = simulated_machine(config), config.scheduler, "as many as are searched"
    check_floor(machine, slos)
    for users in USERS:
        sequences = users if "max_num_seqs" in open_options else limits.max_num_seqs
        budgets = BUDGETS if "max_num_batched_tokens" in open_options else (limits.max_num_batched_tokens,)
        if users > min(sequences, max(budgets)):
            continue
        prompt_ms, step_ms = (1e3 * each_s for each_s in _seconds(machine, users))
        floors_ms = {"ttft": prompt_ms, "tpot": step_ms, "e2el": prompt_ms}
        if missed := next((slo for slo in slos if slo.limit_ms < SLOWER * floors_ms[slo.metric]), None):
            why_not = f"with {users}, {missed.metric} is {SLOWER * floors_ms[missed.metric]:.3g} ms at least"
            continue
        rate_per_s, requests = _chats(machine, users)
        found = plan(config, requests, slos=slos, sequences=(sequences,), budgets=budgets)
        if found.is_met:
            choices = _choices(found, f"{rate_per_s:,.3g} chats/s of {_shape(machine)}", why_not, open_options)
            scheduler = found.chosen.config.scheduler
            return replace(config, scheduler=scheduler, choices={**config.choices, **choices})
        why_not = f"with {users}, {found.chosen.attainment:.0%} of requests would be within all"
    log.warning("no options meet --slo, and none were changed: %s of chats of %s", why_not, _shape(machine))
    return config


def _tokens(machine: SimulatedMachine) -> tuple[int, int]:
    """Return the tokens of a chat, in and out."""
    num_input, num_output = CHAT_TOKENS
    if (room := machine.setup.max_model_len) < num_input + num_output:
        num_output = max(1, room // 5)
        num_input = max(1, room - num_output)
    return num_input, num_output


def _shape(machine: SimulatedMachine) -> str:
    return "{} tokens in and {} out".format(*_tokens(machine))


def _seconds(machine: SimulatedMachine, users: int) -> tuple[float, float]:
    """Return what a prompt takes in one step, and a step in which `users` decode."""
    num_input, num_output = _tokens(machine)
    prompt, step = StepLoad(((num_input, num_input),), 1), StepLoad.decode(users, num_input + num_output // 2)
    return machine.step_time.seconds(prompt), machine.step_time.seconds(step)


def _chats(machine: SimulatedMachine, users: int) -> tuple[float, Sequence[BenchRequest]]:
    """Return a rate that keeps `users` sequences busy for UTILIZATION of the time, and chats that come so."""
    (num_input, num_output), (prompt_s, step_s) = _tokens(machine), _seconds(machine, users)
    rate_per_s = UTILIZATION / (prompt_s + num_output * step_s / users)
    chats = Fixed(num_requests=max(MIN_REQUESTS, 3 * users // 2), input_tokens=num_input, output_tokens=num_output)
    load = Load(schedule="poisson", request_rate_per_s=rate_per_s)
    return rate_per_s, load.schedule_requests(chats.requests())


def _choices(found: Plan, load: str, why_not: str, open_options: Collection[str]) -> Mapping[str, Choice]:
    """Return the values of the open options, each with what its neighbour would have given."""
    wanted = ", ".join(f"{slo.metric} within {slo.limit_ms:g} ms" for slo in found.slos)
    met = f"{wanted} for {found.chosen.attainment:.0%} of {load}, steps {SLOWER:g} times as long"
    why = {"max_num_seqs": f"more: {why_not}"}
    for reason in found.reasons:
        name = reason.partition(" ")[0].removeprefix("--").replace("-", "_")
        why[name] = reason
    scheduler, provenance = found.chosen.config.scheduler, found.chosen.provenance
    return {
        name: Choice(
            str(getattr(scheduler, name)), f"--slo: {met} [{provenance}]; {why.get(name, 'no other was searched')}"
        )
        for name in open_options
    }
