"""A bound on the time between tokens: chunks of prompts beside running sequences are as long as it leaves."""

import pytest
from engine_fakes import Clock, FakeExecutor, expected_tokens, make_layout, make_request
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ridgeline.cache.manager import CacheManager
from ridgeline.core.config import SchedulerConfig
from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.pacing import MAX_UNMEASURED, MIN_CHUNK_TOKENS, UNBOUND_CHUNK_TOKENS
from ridgeline.engine.render import Renderer
from ridgeline.engine.scheduler import Scheduler

BASE_S, TOKEN_S = 0.020, 0.0005
SETTLED = 7  # steps that had both, after which the bound holds


class Costly(FakeExecutor):
    """Takes its time by the fake clock: a base for every step, and more for every token."""

    def __init__(self, layout, clock):
        super().__init__(layout)
        self.clock = clock

    def collect(self):
        self.clock.now += BASE_S + TOKEN_S * self.in_flight[0].num_tokens
        return super().collect()


def run(max_itl_s):
    """Two sequences decode, then long prompts come; return the seconds of steps from then on that had both, and all."""
    layout, clock, deltas = make_layout((400,)), Clock(), []
    executor = Costly(layout, clock)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, max_itl_s=max_itl_s)
    scheduler = Scheduler(config, CacheManager(layout), Autoregressive(), 1000, 8, clock)
    loop = EngineLoop(scheduler, executor, Renderer(None), deltas.extend, clock)
    requests = [make_request(name, [ord(name)] * 40, clock, max_tokens=60) for name in "ab"]
    for request in requests:
        loop.submit(request)
    for step in range(400):
        if step == 8:
            late = [make_request(name, [ord(name)] * 300, clock, max_tokens=4) for name in "cd"]
            requests += late
            for request in late:
                loop.submit(request)
        if not loop.step():
            break
    for request in requests:
        got = [token for delta in deltas if delta.request_id == request.request_id for token in delta.token_ids]
        assert got == expected_tokens(request, 0, 1000)
    mixed = [plan.num_tokens for plan in executor.plans[8:] if len({span.num_tokens > 1 for span in plan.spans}) == 2]
    return [BASE_S + TOKEN_S * count for count in mixed], len(executor.plans), clock.now


@pytest.mark.parametrize("max_itl_s", [0.040, 0.060, 0.1])
def test_steps_of_prompts_beside_decodes_stay_within_the_bound(max_itl_s):
    seconds, _, _ = run(max_itl_s)
    assert max(seconds) <= 1.1 * max_itl_s
    assert sorted(seconds)[len(seconds) // 2] >= 0.7 * max_itl_s  # and use it


def test_without_a_bound_a_step_takes_what_the_budget_has():
    seconds, num_steps, total_s = run(None)
    assert max(seconds) == pytest.approx(BASE_S + TOKEN_S * 256)
    bounded_s, more_steps, more_s = run(0.060)
    assert len(bounded_s) > len(seconds)
    assert more_steps >= num_steps
    assert more_s >= total_s - 1e-9


def test_a_bound_that_cannot_be_held_still_lets_prompts_go_on():
    seconds, _, _ = run(0.001)
    lengths = {round((value - BASE_S) / TOKEN_S) for value in seconds[:-1]}
    assert lengths <= {UNBOUND_CHUNK_TOKENS + n for n in (2, 3, 4)}


def test_a_bound_that_leaves_few_tokens_of_a_prompt_is_held_by_chunks_as_short():
    bound_s = 1.1 * (BASE_S + 10 * TOKEN_S)
    seconds, _, _ = run(bound_s)
    lengths = {round((value - BASE_S) / TOKEN_S) - 2 for value in seconds[SETTLED:]}
    assert max(seconds) <= 1.1 * bound_s and MIN_CHUNK_TOKENS <= max(lengths) < UNBOUND_CHUNK_TOKENS


class Machine(FakeExecutor):
    """Takes a base for every step, more for a row that decodes, and more for a token of a prompt; some steps stall."""

    def __init__(self, layout, clock, base_s, row_s, token_s, stall_every=0):
        super().__init__(layout)
        self.clock, self.base_s, self.row_s, self.token_s, self.stall_every = clock, base_s, row_s, token_s, stall_every
        self.steps = []  # (tokens of prompts, others, seconds without and with what held it up)

    def decode_s(self, num_rows):
        return self.base_s + self.row_s * num_rows

    def collect(self):
        lengths = [len(span.token_ids) for span in self.in_flight[0].spans]
        num_prompt = sum(length for length in lengths if length > 1)
        num_others = sum(length for length in lengths if length == 1)
        seconds = self.decode_s(num_others) + self.token_s * num_prompt
        stalls = self.stall_every and len(self.steps) % self.stall_every == 0
        self.steps.append((num_prompt, num_others, seconds))
        self.clock.now += seconds * (20 if stalls else 1)
        return super().collect()


def serve(machine, clock, layout, arrivals, ratio, depth=1, limit=6000):
    """Run (step, prompt tokens, output tokens) until all have ended, and check every answer."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, max_itl_ratio=ratio)
    scheduler = Scheduler(config, CacheManager(layout), Autoregressive(), 1000, 8, clock)
    deltas, requests = [], []
    loop = EngineLoop(scheduler, machine, Renderer(None), deltas.extend, clock)
    for step in range(limit):
        for index, (_, size, max_tokens) in enumerate(one for one in arrivals if one[0] == step):
            prompt = [7, *divmod(step, 100), index] + [len(requests) % 40] * size
            requests.append(make_request(f"{step}.{index}", prompt, clock, max_tokens=max_tokens))
            loop.submit(requests[-1])
        if not loop.step() and step > max(one[0] for one in arrivals):
            break
    else:
        raise AssertionError("somebody starves")
    for request in requests:
        got = [token for delta in deltas if delta.request_id == request.request_id for token in delta.token_ids]
        assert got == expected_tokens(request, 0, 1000)
    return loop


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 500), st.integers(1, 40)), min_size=2, max_size=12),
    base_s=st.floats(0.001, 0.1),
    row_share=st.floats(0, 0.05),
    token_share=st.floats(0.0005, 0.06),  # of the base: so that more than the least chunk fits
    ratio=st.sampled_from([2.0, 3.0, 5.0]),
    stall_every=st.sampled_from([0, 0, 11]),
)
def test_a_decode_never_waits_longer_than_the_bound(arrivals, base_s, row_share, token_share, ratio, stall_every):
    """Whatever the machine's speed is: once a few steps were measured, every step beside decodes keeps the bound, and
    prompts get on in every step but those that measure."""
    layout, clock = make_layout((3000,)), Clock()
    machine = Machine(layout, clock, base_s, base_s * row_share, base_s * token_share, stall_every)
    serve(machine, clock, layout, arrivals, ratio)
    mixed = [(i, *step) for i, step in enumerate(machine.steps) if step[0] and step[1]]
    assume(len(mixed) > SETTLED)
    for _, num_prompt, num_others, seconds in mixed[SETTLED:]:
        allowed_s = 1.1 * ratio * machine.decode_s(num_others)
        assert seconds <= allowed_s or num_prompt <= UNBOUND_CHUNK_TOKENS + 8
    assert all(num_prompt + num_others <= 256 for _, num_prompt, num_others, _ in mixed)


def test_a_bound_that_is_a_multiple_costs_prompts_no_more_steps_than_it_must():
    """A machine of which 40 tokens of a prompt take as long as a decode: 68 beside one, a tenth below a ratio of 3."""
    layout, clock = make_layout((3000,)), Clock()
    machine = Machine(layout, clock, 0.040, 0.0, 0.001)
    serve(machine, clock, layout, [(0, 20, 60), (20, 900, 5)], 3.0)
    chunks = [num_prompt for num_prompt, num_others, _ in machine.steps[20:] if num_prompt and num_others]
    assert chunks[2:-1] == [pytest.approx(68, abs=2)] * len(chunks[2:-1]) and 12 <= len(chunks) <= 15


def test_without_decodes_a_prompt_has_the_whole_budget():
    layout, clock = make_layout((3000,)), Clock()
    machine = Machine(layout, clock, 0.040, 0.0, 0.001)
    serve(machine, clock, layout, [(0, 20, 4), (20, 700, 1), (40, 700, 1)], 3.0)
    assert [num_prompt for num_prompt, *_ in machine.steps if num_prompt > 100] == [256, 256, 700 + 4 - 512] * 2


def test_a_step_without_prompts_is_measured_now_and_then_in_a_flood_of_them():
    layout, clock = make_layout((3000,)), Clock()
    machine = Machine(layout, clock, 0.040, 0.0, 0.002)
    arrivals = [(0, 5, 400)] + [(step, 400, 1) for step in range(10, 120, 5)]
    serve(machine, clock, layout, arrivals, 3.0)
    beside = [num_prompt > 0 for num_prompt, num_others, _ in machine.steps[10:200] if num_others]
    longest = max(map(len, "".join("x" if mixed else " " for mixed in beside).split()))
    assert MAX_UNMEASURED / 2 < longest <= MAX_UNMEASURED


class Cold(Machine):
    """Takes five times as long for its first step that only decodes."""

    is_cold = True

    def collect(self):
        spans = self.in_flight[0].spans
        if self.is_cold and all(len(span.token_ids) == 1 for span in spans):
            self.is_cold = False
            self.clock.now += 4 * self.decode_s(len(spans))
        return super().collect()


def test_a_first_measurement_that_was_far_off_lengthens_no_chunk():
    layout, clock = make_layout((3000,)), Clock()
    machine = Cold(layout, clock, 0.040, 0.0, 0.001)
    serve(machine, clock, layout, [(0, 5, 400), *[(2, 900, 1)] * 8], 3.0)
    chunks = [num_prompt for num_prompt, num_others, _ in machine.steps if num_prompt and num_others]
    assert 60 < max(chunks) <= 70
