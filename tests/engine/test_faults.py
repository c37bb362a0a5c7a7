"""An error ends the output that it belongs to: its neighbours' tokens stay the same, and no block is lost."""

import pytest
from engine_fakes import VOCAB, Clock, Driver, FakeExecutor, expected_tokens, make_layout, make_request, next_token

from cache_invariants import check_cache
from ridgeline import LLM, SamplingParams
from ridgeline.cache.manager import CacheManager
from ridgeline.core.config import SchedulerConfig
from ridgeline.core.errors import ConfigError
from ridgeline.decoding.proposers import Draft
from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.decoding.strategies.speculative import Speculative
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.render import Renderer
from ridgeline.engine.request import FinishReason
from ridgeline.engine.scheduler import Scheduler
from ridgeline.text.detokenizer import IncrementalDetokenizer

PROMPTS = [[1, 403, 407], [1, 360, 266, 403, 407, 261, 378], [1, 9, 9, 9]]


class Broken(Autoregressive):
    """Raises in `method` when it is called for `is_culprit`, from the `skip`-th such call on."""

    one_token = False  # asked for every span, row and token

    def __init__(self, method, is_culprit, skip=0):
        self.left = skip
        plain = getattr(self, method)

        def broken(view, *args, **kwargs):
            if is_culprit(view):
                self.left -= 1
                if self.left < 0:
                    raise RuntimeError("a defect")
            return plain(view, *args, **kwargs)

        setattr(self, method, broken)


def run_all(driver):
    steps = 0
    while driver.scheduler.running() or driver.scheduler.stats().num_waiting:
        assert driver.step()
        driver.check()
        steps += 1
        assert steps < 300


@pytest.mark.parametrize("skip", [0, 1, 3])
@pytest.mark.parametrize("method", ["salt", "next_span", "rows", "accept"])
def test_an_error_of_a_strategy_call_ends_one_sequence(method, skip):
    """Blocks are scarce, so that `salt` is asked again after a preemption."""
    strategy = Broken(method, lambda view: view.request.prompt_ids[0] == 66, skip)
    driver = Driver(make_layout((9,)), strategy=strategy, max_num_seqs=3, max_num_batched_tokens=8)
    for name in "ABC":
        driver.add(name, [ord(name), 1, 2, 3, 4, 5], max_tokens=12)
    run_all(driver)
    assert strategy.left < 0 or method == "salt", "the defect did not come into play"
    expected = {"A": FinishReason.LENGTH, "B": FinishReason.ERROR, "C": FinishReason.LENGTH}
    if strategy.left < 0:
        assert {name: driver.reasons[name, 0] for name in "ABC"} == expected
        (finish,) = (event for event in driver.finish_events if event.request.request_id == "B")
        assert "RuntimeError" in finish.error
        assert "a defect" not in finish.error  # what an exception says is for the log
    driver.assert_answers(skip={("B", 0)})


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("method", ["rows", "accept"])
def test_of_several_answers_only_the_broken_one_ends(method, index):
    """Also before the fork: the first output computes the prompt for the others."""
    strategy = Broken(method, lambda view: getattr(view, "index", 0) == index and view.request.prompt_ids[0] == 5)
    driver = Driver(make_layout((64,)), strategy=strategy, max_num_seqs=8, max_num_batched_tokens=16)
    driver.add("many", [5, 6, 7, 8, 9], n=3, max_tokens=6)
    driver.add("other", [1, 2], n=2, max_tokens=6)
    run_all(driver)
    assert driver.reasons.pop(("many", index)) is FinishReason.ERROR
    assert set(driver.reasons.values()) == {FinishReason.LENGTH}
    driver.assert_answers(skip={("many", index)})


def test_a_strategy_that_cannot_forget_ends_nothing():
    driver = Driver(make_layout((64,)), strategy=Broken("forget", lambda view: True))
    for name in "AB":
        driver.add(name, [ord(name), 1], max_tokens=4)
    run_all(driver)
    driver.assert_answers()


class TakesBack(Autoregressive):
    rolls_back = True


def test_what_cannot_be_taken_back_is_refused_before_it_runs():
    """A recurrent state has no way back to an earlier token; keys and values of every other kind are written again."""
    Driver(make_layout((8, 8), (None, 5)), strategy=TakesBack())
    with pytest.raises(
        ConfigError, match=r"TakesBack rolls back computed tokens, and recurrent states .* cannot be rolled back"
    ):
        Driver(make_layout((8, 8), (None, "recurrent")), strategy=TakesBack())


@pytest.fixture(scope="module")
def llm(shared_data):
    return LLM(str(shared_data / "models/stories260K"), dtype="float32", num_threads=1, block_size=4)


@pytest.fixture
def scheduler(llm) -> Scheduler:
    scheduler = llm.engine.loop.scheduler
    yield scheduler
    check_cache(scheduler.cache, {})
    assert all(group.used == 0 for group in scheduler.stats().cache.groups)


def completions(llm, culprit=None):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    assert [output.finish_reason for output in outputs] == ["error" if i == culprit else "length" for i in range(3)]
    return [(output.token_ids, output.text) for output in outputs]


@pytest.mark.parametrize("method", ["next_span", "rows", "accept"])
def test_neighbours_of_an_error_in_plan_or_commit_are_the_same(llm, scheduler, monkeypatch, method):
    expected = completions(llm)
    strategy = Broken(method, lambda view: list(view.request.prompt_ids) == PROMPTS[1], skip=5)
    monkeypatch.setattr(scheduler, "strategy", strategy)
    got = completions(llm, culprit=1)
    assert [got[0], got[2]] == [expected[0], expected[2]]
    assert got[1][0] == expected[1][0][: len(got[1][0])]
    monkeypatch.undo()
    assert completions(llm) == expected


@pytest.mark.parametrize("method", ["push", "flush", "__init__"])
def test_an_error_while_rendering_ends_one_answer(llm, scheduler, monkeypatch, method):
    expected = completions(llm)
    plain, broken = getattr(IncrementalDetokenizer, method), []

    def broken_method(self, *args, **kwargs):
        if method == "__init__":
            broken.append(self) if list(args[1]) == PROMPTS[1] else None
            if self in broken:
                raise RuntimeError("a defect")
        elif self in broken and (method == "flush" or self.num_tokens >= 6):
            raise RuntimeError("a defect")
        return plain(self, *args, **kwargs)

    plain_init = IncrementalDetokenizer.__init__

    def noting_init(self, tokenizer, prompt_ids=(), **kwargs):
        plain_init(self, tokenizer, prompt_ids, **kwargs)
        if list(prompt_ids) == PROMPTS[1]:
            broken.append(self)

    if method != "__init__":
        monkeypatch.setattr(IncrementalDetokenizer, "__init__", noting_init)
    monkeypatch.setattr(IncrementalDetokenizer, method, broken_method)
    got = completions(llm, culprit=1)
    assert [got[0], got[2]] == [expected[0], expected[2]]
    assert expected[1][1].startswith(got[1][1])
    monkeypatch.undo()
    assert completions(llm) == expected


@pytest.mark.parametrize("part", ["plan", "commit"])
def test_an_error_that_belongs_to_nobody_ends_what_runs_and_the_engine_goes_on(llm, scheduler, monkeypatch, part):
    expected = completions(llm)
    plain, calls = getattr(scheduler, part), []

    def broken(*args):
        calls.append(part)
        if len(calls) == 4:
            raise RuntimeError("a defect")
        return plain(*args)

    monkeypatch.setattr(scheduler, part, broken)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
    assert all("RuntimeError" in output.outputs[0].error for output in outputs)
    assert completions(llm) == expected


@pytest.mark.parametrize("moment", ["end", "abort", "deadline", "preempt"])
def test_blocks_that_cannot_be_freed_end_no_other_answer(monkeypatch, moment):
    """Nor the loop: what ends an output is an event of its own, outside of plan and commit."""
    layout, clock, deltas = make_layout((64,)), Clock(), []
    cache = CacheManager(layout)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16), cache, Autoregressive(), 100, 4, clock
    )
    loop = EngineLoop(scheduler, FakeExecutor(layout), Renderer(None), deltas.extend, clock)
    release, broken = cache.release, []

    def release_once_broken(seq_id):
        release(seq_id)
        if seq_id == 1 and not broken:
            broken.append(seq_id)
            raise RuntimeError("a defect")

    monkeypatch.setattr(cache, "release", release_once_broken)
    requests = [make_request(name, [ord(name), 1, 2], clock, max_tokens=8) for name in "ac"]
    requests.insert(1, make_request("b", [98, 1, 2], clock, max_tokens=8, n=2, deadline_s=clock.now + 5))
    for request in requests:
        loop.submit(request)
    for step in range(60):
        if step == 3 and moment == "abort":
            loop.abort("b")
        if step == 3 and moment == "deadline":
            clock.now += 9
        if step == 3 and moment == "preempt":
            scheduler.preempt(next(seq for seq in scheduler.running() if seq.seq_id == 1))
        if not loop.step():
            break
    assert broken
    assert not (scheduler.running() or scheduler.stats().num_waiting)
    got = {(request.request_id, index): [] for request in requests for index in range(request.params.n)}
    for delta in deltas:
        got[delta.request_id, delta.index] += delta.token_ids
    cut_short = moment in ("abort", "deadline")
    for request in requests:
        for index in range(request.params.n):
            expected = expected_tokens(request, index, 100)
            tokens = got[request.request_id, index]
            assert tokens == expected[: len(tokens)]
            assert tokens == expected or (request.request_id == "b" and cut_short)
    assert scheduler.stats().cache.groups[0].used == 0


class _Guess:
    """Drafts four tokens, of which the first two are what the fake model will say."""

    def propose(self, view, max_tokens):
        tokens = list(view.token_ids)
        for i in range(min(4, max_tokens)):
            token = next_token(tokens, view.seed, len(tokens) - len(view.request.prompt_ids))
            tokens.append(token if i < 2 else (token + 1) % VOCAB)
        return Draft(tokens[len(view.token_ids) :], 0)

    def forget(self, view):
        pass


@pytest.mark.parametrize(("broken_row", "ends"), [(4, False), (3, False), (2, True), (0, True)])
def test_logits_behind_a_rejected_token_do_not_matter(broken_row, ends):
    """Rows 0 to 2 decide tokens: two drafted ones and the one that replaces the third. Those behind are of no text."""
    strategy = Speculative({"guess": _Guess()}, 4, None, lambda: 0.0)
    driver = Driver(make_layout((64,)), strategy=strategy, max_num_rows=16, max_num_batched_tokens=16)
    compute = driver.executor.compute

    def broken(plan):
        result, samples = compute(plan), []
        for row, sampled in zip(plan.samples, result.samples, strict=True):
            first = next(other.row for other in plan.samples if other.seq_id == row.seq_id)
            bad = row.seq_id == plan.samples[0].seq_id and row.row - first == broken_row and plan.step == 4
            samples.append(sampled._replace(token_id=0, error="not finite") if bad else sampled)
        return result._replace(samples=tuple(samples))

    driver.executor.compute = broken
    for name in "ab":
        driver.add(name, [ord(name) % VOCAB, 1, 2], max_tokens=20)
    driver.run()
    assert any(span.num_optional == 4 for span in driver.executor.plans[3].spans)
    assert driver.reasons["a", 0] is (FinishReason.ERROR if ends else FinishReason.LENGTH)
    assert driver.reasons["b", 0] is FinishReason.LENGTH
    for name in "ab":
        if driver.reasons[name, 0] is FinishReason.LENGTH:
            assert driver.tokens[name, 0] == expected_tokens(driver.requests[name], 0, driver.max_model_len)


class Tripping:
    """An executor that raises, after it has written all keys and values, where a step has a span that `trips`."""

    depth = 1
    observer = None

    def __init__(self, inner, trips):
        self.hurry = inner.hurry
        self.inner, self.trips, self.plan, self.num_runs, self.failed = inner, trips, None, 0, 0

    def submit(self, plan):
        self.plan = plan

    def collect(self):
        return self.compute(self.plan)

    def compute(self, plan):
        result = self.inner.compute(plan)
        self.num_runs += 1
        if any(self.trips(span) for span in plan.spans):
            self.failed += 1
            raise RuntimeError("a defect")
        return result


def looped(layout, executor, requests, num_rows=16, **config):
    clock, deltas = Clock(), []
    scheduler = Scheduler(SchedulerConfig(**config), CacheManager(layout), Autoregressive(), 100, num_rows, clock)
    loop = EngineLoop(scheduler, executor, Renderer(None), deltas.extend, clock)
    for request in requests:
        loop.submit(request)
    for _ in range(200):
        if not loop.step():
            break
    got, finished = {}, {}
    for delta in deltas:
        got.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        if delta.finish is not None:
            finished[delta.request_id, delta.index] = delta.finish
    assert all(group.used == 0 for group in scheduler.stats().cache.groups)
    return got, finished


@pytest.mark.parametrize("start", [0, 6, 8])
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("num_culprits", [0, 1, 2])
def test_a_failing_step_ends_who_makes_it_fail_alone(count, num_culprits, start):
    """In the prompt, in the first step after outputs have forked, whose blocks are copied on write, and later."""
    layout, clock = make_layout((200,)), Clock()
    requests = [
        make_request(f"r{i}", [7, 8, 9, 10, 20 + i, 3], clock, max_tokens=9, n=1 + 2 * (i % 3 == 1))
        for i in range(count)
    ]
    first_ids = [sum(before.params.n for before in requests[:i]) for i in range(count)]
    culprits = list(range(0, count, max(1, count // 2)))[:num_culprits]
    ids = {first_ids[i] for i in culprits}
    executor = Tripping(FakeExecutor(layout), lambda span: span.seq_id in ids and span.start >= start)
    got, finished = looped(layout, executor, requests, max_num_seqs=32, max_num_batched_tokens=64)
    assert (executor.failed > 0) == (num_culprits > 0)
    for number, request in enumerate(requests):
        for index in range(request.params.n):
            end = finished[request.request_id, index]
            expected = expected_tokens(request, index, 100)
            tokens = got[request.request_id, index]
            if number in culprits:
                assert end.reason is FinishReason.ERROR and "RuntimeError" in end.error
                assert tokens == expected[: len(tokens)]
            else:
                assert end.reason is FinishReason.LENGTH
                assert tokens == expected


def test_a_step_that_nothing_can_compute_ends_all_of_it_after_few_runs():
    layout, clock = make_layout((400,)), Clock()
    executor = Tripping(FakeExecutor(layout), lambda span: True)
    requests = [make_request(f"r{i}", [1, i], clock, max_tokens=4) for i in range(64)]
    _, finished = looped(layout, executor, requests, num_rows=64, max_num_seqs=64, max_num_batched_tokens=256)
    assert {end.reason for end in finished.values()} == {FinishReason.ERROR} and len(finished) == 64
    assert executor.num_runs <= 1 + 32


def test_a_step_that_fails_once_costs_nobody_anything():
    layout, clock = make_layout((200,)), Clock()
    executor = Tripping(FakeExecutor(layout), lambda span: executor.num_runs in (1, 4))
    requests = [make_request(f"r{i}", [5, i, 6], clock, max_tokens=8) for i in range(5)]
    got, finished = looped(layout, executor, requests, max_num_seqs=8, max_num_batched_tokens=64)
    assert executor.failed == 2 and {end.reason for end in finished.values()} == {FinishReason.LENGTH}
    assert all(got[r.request_id, 0] == expected_tokens(r, 0, 100) for r in requests)


@pytest.mark.parametrize("moment", [0, 1, 7])
def test_neighbours_of_a_step_that_fails_are_the_same(llm, scheduler, monkeypatch, moment):
    """Also with log-probabilities of prompts, whose rows are renumbered."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    expected = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    executor, culprit = llm.engine.executor, []
    plain_compute, steps = executor.compute, []

    def compute(plan):
        steps.extend([plan.step] if plan.step > 0 else [])
        result = plain_compute(plan)
        if len(steps) > moment:
            culprit.extend([plan.spans[1].seq_id] if not culprit else [])
            if any(span.seq_id in culprit for span in plan.spans):
                raise RuntimeError("a defect")
        return result

    monkeypatch.setattr(executor, "compute", compute)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    ends = [output.outputs[0].finish_reason for output in outputs]
    assert sorted(ends) == ["error", "length", "length"]
    for output, plain in zip(outputs, expected):
        got = output.outputs[0]
        assert got.token_ids == plain.token_ids[: len(got.token_ids)]
        if got.finish_reason == "length":
            assert (got.token_ids, got.logprobs) == (plain.token_ids, plain.logprobs)
