"""Beams share their blocks by forks of live sequences: whatever the cache does, they are those of a plain search."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cache_invariants import check_cache
from ridgeline import LLM, SamplingParams
from ridgeline.decoding.request import Request
from ridgeline.engine.outputs import RequestOutput
from ridgeline.engine.request import FinishReason

PROMPT = [403, 407, 261, 378, 31, 9, 300]
WIDTH, NUM_TOKENS = 4, 14
BLOCK_BYTES = 1280  # a token's, of stories260K in float32


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> str:
    return str(shared_data / "models/stories260K")


def small_llm(model: str, **options: object) -> LLM:
    return LLM(model, **{"dtype": "float32", "num_threads": 1, "max_model_len": 64} | options)


def search(llm: LLM, prompt: list[int] = PROMPT, *, penalty: float = 1.0, **params: object) -> Request:
    asked = {"n": WIDTH, "max_tokens": NUM_TOKENS, "logprobs": 0, "ignore_eos": True} | params
    return replace(llm.engine.intake.request(prompt, SamplingParams(**asked)), length_penalty=penalty)


def run(llm: LLM, *requests: Request) -> list[RequestOutput]:
    outputs = {request.request_id: RequestOutput.begun(request) for request in requests}
    for delta in llm._deltas(requests):
        outputs[delta.request_id].extend(delta)
    assert all(output.finished for output in outputs.values())
    return list(outputs.values())


def found(output: RequestOutput) -> list[tuple[list[int], float]]:
    return [(one.token_ids, pytest.approx(one.cumulative_logprob, abs=1e-4)) for one in output.outputs]


def assert_nothing_is_left(llm: LLM) -> None:
    stats = llm.engine.loop.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert all(group.used == 0 for group in stats.cache.groups)
    check_cache(llm.engine.loop.scheduler.cache)


@pytest.fixture(scope="module")
def expected(stories: str) -> list[tuple[list[int], float]]:
    """The search by requests of one token, each of which computes its whole prompt."""
    llm = small_llm(stories, enable_prefix_caching=False)
    live = [([], 0.0)]
    for _ in range(NUM_TOKENS):
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * WIDTH, ignore_eos=True)
        outputs = llm.generate([[*PROMPT, *ids] for ids, _ in live], params, use_tqdm=False)
        longer = [
            ([*ids, token_id], total + logprob)
            for (ids, total), output in zip(live, outputs, strict=True)
            for token_id, logprob in output.outputs[0].logprobs[0].top
        ]
        live = sorted(longer, key=lambda each: -each[1])[:WIDTH]
    return live


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_no_token_is_computed_twice(stories, expected, block_size, caching):
    """A block is copied only for the tokens of an unfinished one, never more than one for each fork."""
    llm = small_llm(stories, block_size=block_size, enable_prefix_caching=caching)
    (output,) = run(llm, search(llm))
    assert found(output) == expected
    steps, journal = llm.engine.loop.stats().num_steps, llm.engine.loop.journal
    assert steps == NUM_TOKENS
    _, records = journal.steps.read()
    assert records["num_tokens"].sum() == len(PROMPT) + WIDTH * (NUM_TOKENS - 1)
    assert (records["num_copies"].sum() == 0) == (block_size == 1)
    assert records["num_copies"].max() < WIDTH
    assert_nothing_is_left(llm)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_tokens", [24, 40, 64])
def test_beams_outlive_a_cache_that_has_no_room_for_them(stories, expected, num_tokens, caching, backend):
    """Down to one that holds no more than one of them: who waits for the others gives its blocks to them."""
    options = {"block_size": 8, "enable_prefix_caching": caching, "kv_cache_bytes": num_tokens * BLOCK_BYTES}
    llm = small_llm(stories, max_model_len=24, backend=backend, **options)
    (output,) = run(llm, search(llm))
    assert found(output) == expected
    assert (llm.engine.loop.stats().num_preemptions > 0) == (num_tokens < 64)
    assert_nothing_is_left(llm)


def test_beams_beside_others(stories, expected):
    """Each gets what it gets alone, also where all of them are preempted again and again."""
    llm = small_llm(stories, block_size=4)
    prompts = [[5, 6, 7], [9] * 9]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    alone = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    short = found(run(llm, search(llm, [11, 12], max_tokens=6, n=2))[0])
    scheduler, plan = llm.engine.loop.scheduler, llm.engine.loop.scheduler.plan
    steps = 0

    def preempting_plan():
        nonlocal steps
        steps += 1
        running = [seq for seq in scheduler.running() if seq.seq_id not in scheduler._in_flight]
        if steps % 2 and running:
            scheduler.preempt(running[steps % len(running)])
        return plan()

    for each in (plan, preempting_plan):
        scheduler.plan = each
        beside = [llm.engine.intake.request(prompt, params) for prompt in prompts]
        outputs = run(llm, search(llm), *beside, search(llm, [11, 12], max_tokens=6, n=2))
        assert found(outputs[0]) == expected
        assert [output.outputs[0].token_ids for output in outputs[1:3]] == alone
        assert found(outputs[3]) == short
        assert_nothing_is_left(llm)
    assert scheduler.stats().num_preemptions > 5


@pytest.mark.parametrize("how", ["abort", "deadline", "error", "fault"])
def test_beams_end_together(stories, how):
    llm = small_llm(stories, block_size=4)
    request, loop = search(llm), llm.engine.loop
    request = replace(request, deadline_s=llm.engine.loop.clock() + 3600)
    loop.submit(request)
    for _ in range(5):
        loop.step()
    delivered = []
    loop._deliver = delivered.extend
    beam = loop.scheduler.running()[2]
    match how:
        case "abort":
            loop.abort(request.request_id)
        case "deadline":
            loop.clock = loop.scheduler._clock = lambda: request.deadline_s + 1
        case "error":
            loop._unheard += loop.scheduler.finish(request.request_id, 2, FinishReason.ERROR, "its logits")
        case "fault":
            loop.scheduler.fault(beam, ValueError("it has none"))
    while loop.step() or loop._in_flight:
        pass
    reasons = {"abort": FinishReason.ABORT, "deadline": FinishReason.DEADLINE}
    assert [delta.finish.reason for delta in delivered] == [reasons.get(how, FinishReason.ERROR)] * WIDTH
    assert sorted(delta.index for delta in delivered) == list(range(WIDTH))
    assert_nothing_is_left(llm)


def test_logits_that_are_no_numbers_end_all_beams(stories):
    llm = small_llm(stories, block_size=4)
    loop, request = llm.engine.loop, search(llm)
    compute = loop._executor.collect

    def broken():
        result = compute()
        samples = result.samples
        if result.step == 4:
            samples = (*samples[:1], samples[1]._replace(error="no number"), *samples[2:])
        return result._replace(samples=samples)

    loop._executor.collect = broken
    (output,) = run(llm, request)
    assert [one.finish_reason for one in output.outputs] == ["error"] * WIDTH
    assert_nothing_is_left(llm)


@pytest.mark.parametrize(("penalty", "ends"), [(0.0, False), (1.0, False), (1.0, True), (2.0, True)])
def test_beams_are_those_of_transformers(stories, penalty, ends):
    """Also where they end; theirs lack ends that are not among the best `n` continuations of a round."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    llm = small_llm(stories)
    end = 426 if ends else 511  # a period, and what it never says
    theirs = model.generate(
        torch.tensor([PROMPT]), num_beams=WIDTH, num_return_sequences=WIDTH, max_new_tokens=12, do_sample=False,
        length_penalty=penalty, early_stopping=False, eos_token_id=end, pad_token_id=end, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    (output,) = run(llm, search(llm, max_tokens=12, stop_token_ids=[end], penalty=penalty))
    for tokens, score, ours in zip(theirs.sequences, theirs.sequences_scores, output.outputs, strict=True):
        length = len(ours.token_ids)
        rest = tokens[len(PROMPT) :].tolist()
        assert rest[:length] == ours.token_ids and set(rest[length:]) <= {end}
        assert ours.cumulative_logprob / length**penalty == pytest.approx(float(score), abs=1e-4)
        assert np.isclose(sum(each.logprob for each in ours.logprobs), ours.cumulative_logprob)
