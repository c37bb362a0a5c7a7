"""Steps that run on other threads while the caller does something else: the same bits whenever it joins, or never."""

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ridgeline._native", reason="the native module is not built")
sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))
from native_steps import CONTEXT, native, schedule, step
from tiny_models import build

from ridgeline import LLM, SamplingParams, _native
from ridgeline.backends.step import SamplingMetadata
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.engine.executor import InlineExecutor, OverlappedExecutor

FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next", "mamba2")  # every kind of instruction
DELAYS_S = (0, 0, 1e-5, 1e-4, 1e-3)
GENERATE = """
from ridgeline import LLM, SamplingParams
llm = LLM("python-1m", backend="native", num_threads=2, max_model_len=256)
loop = llm.engine.loop
params = SamplingParams(max_tokens=100, ignore_eos=True)
loop.submit(llm.engine.intake.request([5, 6, 7], params))
for _ in range(5):
    loop.step()
assert loop._in_flight
"""
PROMPTS = [[7, 8, 9], list(range(5, 90)), [11], [12, 13, 14, 15], [9, 9]]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return build(request.param, 1, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_a_started_step_is_the_same_whenever_the_caller_joins(model, threads):
    program, settings = model.lowered(CONTEXT), {"num_threads": threads, "deterministic": True}
    whole, started = (native(program, model.weights, _native.best_level(), **settings) for _ in range(2))
    ids = np.random.default_rng(5).integers(0, model.spec.vocab_size, (3, CONTEXT - 2))
    random = np.random.default_rng(threads)
    for number, spans in enumerate(schedule(ids, np.random.default_rng(3))):
        batch = step(program, spans)
        expected = whole.run(batch)
        started.start(batch)
        time.sleep(random.choice(DELAYS_S))
        if number % 4 == 3:  # somebody else's step comes between: what was started is finished first
            _native.read_all(_native.best_level(), started.pool, ids.ctypes.data, ids.nbytes // 8 * 8)
        found, _ = started.finish()
        assert np.array_equal(found.logits_RV, expected.logits_RV)
        assert np.array_equal(found.sampled_token_ids, expected.sampled_token_ids)


def greedy(num_rows):
    """All rows sampled within the step, the most likely token each."""
    zeros = np.zeros(num_rows, np.int64)
    return SamplingMetadata(
        np.arange(num_rows), zeros.astype("f4"), zeros.astype("i4"), zeros + 1.0, zeros + 0.0, zeros.astype("u8"),
        zeros.astype("u8"), zeros - 1, np.zeros((0, 0), "u8"),
    )  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("follows", [False, True])
def test_masks_may_be_written_until_the_caller_joins(model, threads, follows):
    """However late it comes: nobody samples by what stood there before."""
    program, settings = model.lowered(CONTEXT), {"num_threads": threads, "deterministic": True}
    whole, started = (native(program, model.weights, _native.best_level(), **settings) for _ in range(2))
    random, vocab = np.random.default_rng(threads), model.spec.vocab_size
    only = np.zeros((vocab, -(-vocab // 64)), "u8")  # [token] the mask that allows this one alone
    only[np.arange(vocab), np.arange(vocab) // 64] = np.uint64(1) << (np.arange(vocab) % 64).astype("u8")
    follow = None
    for at in range(15):
        bound = replace(greedy(3), mask_row=np.array([0, -1, 1]), masks_MW=only[random.integers(0, vocab, 2)])
        batch = step(program, [(s, at, [5 + s]) for s in range(3)], bound)
        expected = whole.run(batch).sampled_token_ids
        batch.sampling.masks_MW[:] = only[random.integers(0, vocab, 2)]
        if follow is None:
            started.start(batch)
        else:
            follow.token_ids_T[:], follow.sampling.masks_MW[:] = batch.token_ids_T, batch.sampling.masks_MW
            batch = follow
        follow = step(program, [(s, at + 1, [5 + s]) for s in range(3)], bound) if follows and at < 14 else None
        assert follow is None or started.follow(follow)
        time.sleep(random.choice(DELAYS_S))
        batch.sampling.masks_MW[:] = bound.masks_MW
        output, goes_on = started.finish()
        assert np.array_equal(output.sampled_token_ids, expected) and goes_on == (follow is not None)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_step_that_follows_goes_on_from_the_tokens_of_the_one_before(model, threads):
    """And both results are there, whenever they are looked at; a token that is known stays what it is."""
    program, settings = model.lowered(CONTEXT), {"num_threads": threads, "deterministic": True}
    whole, started = (native(program, model.weights, _native.best_level(), **settings) for _ in range(2))
    random = np.random.default_rng(threads)
    tokens, expected = np.array([5, 6, 7]), []

    def decode(at, ids):
        return step(program, [(s, at, [int(ids[s])]) for s in range(3)], greedy(3))

    for at in range(20):
        output = whole.run(decode(at, tokens))
        tokens = np.array([9, *output.sampled_token_ids[1:]])
        expected.append((output.logits_RV.copy(), output.sampled_token_ids))
    batches = [decode(0, [5, 6, 7]), *(decode(at, [9, -1, -1]) for at in range(1, 20))]
    started.start(batches[0])
    found = []
    for at in range(20):
        if at < 19:
            assert started.follow(batches[at + 1])
        time.sleep(random.choice(DELAYS_S))
        output, goes_on = started.finish()
        assert goes_on == (at < 19)
        time.sleep(random.choice(DELAYS_S))
        found.append((output.logits_RV.copy(), output.sampled_token_ids))
    for (logits, ids), (expected_logits, expected_ids) in zip(found, expected, strict=True):
        assert np.array_equal(logits, expected_logits) and np.array_equal(ids, expected_ids)


def test_a_step_that_cannot_follow_is_not_started(model):
    program = model.lowered(CONTEXT)
    executable = native(program, model.weights, _native.best_level(), num_threads=2)
    first = step(program, [(0, 0, [5]), (1, 0, [6])], greedy(2))
    with pytest.raises(ValueError, match="no step was started"):
        executable.follow(first)
    executable.start(first)
    executable.follow(step(program, [(0, 1, [-1])], greedy(1)))
    output, goes_on = executable.finish()
    assert not goes_on and (output.sampled_token_ids >= 0).all()
    executable.start(first)
    executable.follow(step(program, [(0, 1, [-1]), (1, 1, [-1])], greedy(2)))
    again = executable.run(first)  # what was to follow is forgotten
    assert np.array_equal(again.sampled_token_ids, output.sampled_token_ids)
    with pytest.raises(ValueError, match="no step was started"):
        executable._tape.finish()


def test_another_thread_may_finish_and_a_second_start_ends_the_first(model):
    program = model.lowered(CONTEXT)
    executable = native(program, model.weights, _native.best_level(), num_threads=2)
    ids = np.random.default_rng(5).integers(0, model.spec.vocab_size, 9)
    executable.start(step(program, [(0, 0, ids)]))
    other = threading.Thread(target=executable.finish)
    other.start()
    other.join()
    with pytest.raises(AssertionError, match="no step was started"):
        executable.finish()
    with pytest.raises(ValueError, match="no step was started"):
        executable._tape.finish()


@pytest.mark.parametrize("ending", ["", "del llm, loop", "raise SystemExit", "import os; os.fork()"])
def test_an_interpreter_ends_with_a_step_under_way(ending):
    done = subprocess.run([sys.executable, "-c", GENERATE + ending], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr


def test_an_engine_is_dropped_with_a_step_under_way():
    """The collector takes its parts in any order: what the step reads must outlive it."""
    one = GENERATE.partition("llm = ")[2].replace("[5, 6, 7]", "[5, 6, 7] * 50")
    body = "".join(
        f"    {line}\n" for line in ("llm = " + one + "loop.own = loop\ndel llm, loop\ngc.collect()").splitlines()
    )
    program = f"import gc\nfrom ridgeline import LLM, SamplingParams\nfor _ in range(6):\n{body}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr


@pytest.fixture(scope="module")
def engines():
    settings = {"backend": "native", "max_model_len": 256, "deterministic": True, "max_num_seqs": 4}
    one, two = (LLM("python-1m", num_threads=threads, **settings) for threads in (1, 2))
    assert type(one.engine.executor) is InlineExecutor
    assert type(two.engine.executor) is OverlappedExecutor
    return one, two


def test_a_result_tells_how_long_the_next_step_was_laid_out_before_it(engines, monkeypatch):
    _, two = engines
    executor, next_s, started = two.engine.executor, [], []
    start, collect = executor._start, executor.collect

    def slow(plan):
        time.sleep(0.01)
        started.append(plan.step)
        return start(plan)

    def told():
        before, result = len(started), collect()
        next_s.append((result.next_s, len(started) > before))
        return result

    monkeypatch.setattr(executor, "_start", slow)
    monkeypatch.setattr(executor, "collect", told)
    two.generate([[5, 6, 7] * 40] * 6, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert {has for _, has in next_s} == {True, False}
    assert all((seconds >= 0.01) == has for seconds, has in next_s)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 5, "n": 3},
        {"temperature": 1, "seed": 5, "logprobs": 3, "prompt_logprobs": 1},
        {"temperature": 1, "seed": 5, "repetition_penalty": 1.2},
        {"temperature": 1, "seed": 5, "stop": ["("]},
        {"temperature": 1, "seed": 5, "ignore_eos": False, "min_tokens": 8},
        {"temperature": 1, "seed": 5, "structured_outputs": StructuredOutputsParams(regex="[a-z]{30}")},
    ],
    ids=lambda params: " ".join(params),
)
def test_outputs_do_not_depend_on_planning_ahead(engines, params):
    """Alone, among others of another kind, and with more of them than there are slots."""
    many = [SamplingParams(**{"ignore_eos": True, "max_tokens": 20 + 7 * i} | params) for i in range(len(PROMPTS))]
    mixed = [each if i % 2 else SamplingParams(temperature=0, max_tokens=40) for i, each in enumerate(many)]
    for chosen in (many, mixed):
        found = [engine.generate(PROMPTS, chosen, use_tqdm=False) for engine in engines]
        for one, two in zip(*found, strict=True):
            assert [(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in one.outputs] == [
                (o.token_ids, o.text, o.finish_reason, o.logprobs) for o in two.outputs
            ]


def test_steps_are_planned_before_the_one_under_way_is_taken_in(engines):
    """And a step that fails then costs its culprit alone, where the one planned behind it had its tokens as well."""
    _, engine = engines
    loop, executor = engine.engine.loop, engine.engine.executor
    num_ahead, num_followed, submit, finish, failed = 0, 0, executor.submit, executor._overlapping.finish, []

    def counting(plan):
        nonlocal num_ahead
        num_ahead += any(span.pending for span in plan.spans)
        submit(plan)

    def breaking():
        nonlocal num_followed
        result = finish()
        num_followed += result[-1]
        if num_ahead == 5 and not failed:
            failed.append(loop._in_flight)
            raise RuntimeError("a defect")
        return result

    expected = engine.generate(
        PROMPTS[:3], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False
    )
    executor.submit, executor._overlapping.finish = counting, breaking
    try:
        found = engine.generate(
            PROMPTS[:3], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False
        )
    finally:
        del executor.submit, executor._overlapping.finish
    assert num_ahead > 20 and num_followed > 20 and failed
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
