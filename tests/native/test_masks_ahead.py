"""Grammars beside steps that are planned ahead: masks come late, and the tokens are those of one step after another."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("ridgeline._native", reason="the native module is not built")
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import RequestError
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.decoding.checking import other_token
from ridgeline.engine import unfinished
from ridgeline.engine.executor import InlineExecutor, OverlappedExecutor
from ridgeline.text.grammar import MAX_EXPECTED, GrammarState

PROMPTS = [[7, 8, 9], list(range(5, 90)), [11], [12, 13, 14, 15], [9, 9]]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
GRAMMARS = [
    None,
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(regex="(?s:.{9,})"),
    StructuredOutputsParams(regex="([a-z]{2,4}[ ,.])+!"),
    StructuredOutputsParams(choice=("positive", "negative")),
    StructuredOutputsParams(grammar='root ::= item ("," item){1,9}\nitem ::= [a-f]{2}'),
]
RULES = {
    "top_k": st.sampled_from([1, 3, 2000]),
    "top_p": st.sampled_from([0.1, 0.9]),
    "min_p": st.sampled_from([0.05, 0.5]),
    "repetition_penalty": st.just(1.3),
    "frequency_penalty": st.just(0.5),
    "logit_bias": st.sampled_from([{30: 9.0}, {5: -100.0, 8: 4.0}]),
    "min_tokens": st.integers(1, 12),
    "stop": st.sampled_from(["a", '"n"', ","]),
    "logprobs": st.integers(0, 2),
    "n": st.integers(2, 3),
    "ignore_eos": st.just(True),
}
PARAMS = st.builds(
    lambda grammar, temperature, seed, max_tokens, rules: SamplingParams(
        structured_outputs=grammar, temperature=temperature, seed=seed, max_tokens=max_tokens, **rules
    ),
    st.sampled_from(GRAMMARS),
    st.sampled_from([0.0, 1.0, 1.5]),
    st.integers(0, 9),
    st.integers(12, 40),
    st.fixed_dictionaries({}, optional=RULES),
)


@pytest.fixture(autouse=True, scope="module")
def looks():
    """As with a large vocabulary, greedy tokens are looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unfinished, "MIN_LOOKED", 0)
        yield


@pytest.fixture(scope="module")
def engines():
    options = {"backend": "native", "max_model_len": 256, "deterministic": True, "max_num_seqs": 4}
    one, two = (LLM("python-1m", num_threads=threads, **options) for threads in (1, 2))
    assert type(one.engine.executor) is InlineExecutor
    assert type(two.engine.executor) is OverlappedExecutor
    return one, two


def outcomes(engine, params):
    """What each output is."""
    outputs = engine.generate(PROMPTS[: len(params)], params, use_tqdm=False)
    assert not engine.engine.loop.scheduler.running()
    return [(o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs) for each in outputs for o in each.outputs]


@settings(max_examples=40, deadline=None)
@given(params=st.lists(PARAMS, min_size=1, max_size=5))
def test_outputs_do_not_depend_on_planning_ahead_of_grammars(engines, params):
    """By every combination of rules, alone and in turns on fewer slots than outputs."""
    one, two = (outcomes(engine, params) for engine in engines)
    assert one == two


def test_steps_with_a_grammar_are_planned_before_the_one_under_way_is_taken_in(engines, monkeypatch):
    """And start as that one ends, with masks that are computed behind it."""
    _, engine = engines
    executor, counts = engine.engine.executor, {"ahead": 0, "followed": 0, "late": 0}
    submit, finish, prepare = executor.submit, executor._overlapping.finish, GrammarState.prepare

    def counting(plan):
        counts["ahead"] += any(span.pending for span in plan.spans)
        submit(plan)

    def finishing():
        result = finish()
        counts["followed"] += result[-1]
        return result

    def preparing(state):
        counts["late"] += executor._started is not None
        prepare(state)

    monkeypatch.setattr(executor, "submit", counting)
    monkeypatch.setattr(executor._overlapping, "finish", finishing)
    monkeypatch.setattr(GrammarState, "prepare", preparing)
    params = [SamplingParams(temperature=0, max_tokens=40, structured_outputs=grammar) for grammar in GRAMMARS[:4]]
    outcomes(engine, params)
    assert counts["ahead"] > 30 and counts["followed"] > 30 and counts["late"] > 90


def test_a_grammar_that_gives_up_ends_its_output_alone(engines, monkeypatch):
    """Where the next step is under way already: what it samples for that one is dropped."""
    params = [SamplingParams(temperature=0, max_tokens=30, structured_outputs=each) for each in (*GRAMMARS[1:4], None)]
    expected = outcomes(engines[0], params)
    prepare, victims = GrammarState.prepare, {}

    def giving_up(state):
        if victims.setdefault(id(state), len(victims)) == 1 and state.num_masks > 8:
            raise RequestError("the grammar gave up, make it simpler: too big", param="structured_outputs")
        prepare(state)

    def counted(state):
        state.num_masks = getattr(state, "num_masks", 0) + 1
        giving_up(state)

    monkeypatch.setattr(GrammarState, "prepare", counted)
    engine = engines[1].engine
    requests = [engine.intake.request(prompt, each) for prompt, each in zip(PROMPTS, params)]
    deltas = {request.request_id: [] for request in requests}
    engine.loop._deliver, deliver = lambda found: [deltas[d.request_id].append(d) for d in found], engine.loop._deliver
    try:
        for request in requests:
            engine.loop.submit(request)
        while engine.loop.step():
            pass
    finally:
        engine.loop._deliver = deliver
    found = [([t for d in each for t in d.token_ids], each[-1].finish) for each in deltas.values()]
    for index, ((tokens, finish), (expected_tokens, *_)) in enumerate(zip(found, expected, strict=True)):
        if index == 1:
            assert finish.reason == "refused" and finish.error.endswith("too big")
            assert 0 < len(tokens) < len(expected_tokens) and tokens == list(expected_tokens[: len(tokens)])
        else:
            assert tokens == list(expected_tokens) and finish.error is None
    assert outcomes(engines[1], [params[0], params[3]]) == outcomes(engines[0], [params[0], params[3]])


def test_the_likeliest_token_is_looked_at_instead_of_a_mask_and_the_outcome_is_the_same(engines, monkeypatch):
    """A bias of 0 makes no difference, and has every mask computed. Where nothing is forbidden there is no mask."""
    mask, counts = GrammarState.mask, {"masks": 0}

    def masking(state):
        counts["masks"] += 1
        return mask(state)

    monkeypatch.setattr(GrammarState, "mask", masking)
    for grammar in GRAMMARS[1:]:
        params = [SamplingParams(temperature=0, max_tokens=40, structured_outputs=grammar, logprobs=1)] * len(PROMPTS)
        masked = outcomes(engines[1], [replace(each, logit_bias={30: 0.0}) for each in params])
        counts["masks"] = 0
        assert outcomes(engines[0], params) == outcomes(engines[1], params) == masked
        if grammar.regex == "(?s:.{9,})":
            assert counts["masks"] <= 2 * len(PROMPTS)


def test_of_a_small_vocabulary_no_token_is_looked_at_and_the_outcome_is_the_same(engines, monkeypatch):
    params = [SamplingParams(temperature=0, max_tokens=40, structured_outputs=each) for each in GRAMMARS[1:]]
    looked_at = outcomes(engines[1], params)
    monkeypatch.setattr(unfinished, "MIN_LOOKED", 2**20)
    monkeypatch.delattr(GrammarState, "allows")
    assert outcomes(engines[1], params) == looked_at


def test_what_is_checked_is_what_a_mask_says_at_every_token(engines):
    """Also where a grammar forces what comes, and one of its spellings alone is allowed."""
    rng = np.random.default_rng(1)
    compiler = engines[0].engine.intake._grammars
    for grammar in map(compiler.compile, GRAMMARS[1:]):
        masked, known = grammar.start(), []
        for _ in range(30):
            allowed_V = np.unpackbits(masked.mask().view(np.uint8), bitorder="little").astype(bool)
            (inside,) = np.nonzero(allowed_V)
            possible = [token_id for token_id in range(len(allowed_V)) if masked.fitting([token_id])]
            for token_id in [*rng.integers(0, len(allowed_V), 9), *rng.permutation(inside)[:20], *possible[:20]]:
                logits_V = rng.standard_normal(len(allowed_V)).astype(np.float32)
                logits_V[token_id] = 99.0
                state = grammar.start(guesses=True)
                assert not any(map(state.accept, known))
                state.prepare()
                expected = token_id if allowed_V[token_id] else np.where(allowed_V, logits_V, -np.inf).argmax()
                fits_V = np.unpackbits(state.allowed.view(np.uint8), bitorder="little").astype(bool)
                sampled = int(np.where(fits_V, logits_V, -np.inf).argmax())
                assert (sampled if state.allows(sampled) else other_token(state, logits_V[None], 0)) == expected
            known.append(int(rng.choice(inside)))
            if masked.accept(known[-1]):
                break


def test_a_wrong_guess_by_itself_costs_one_mask_and_several_in_a_row_cost_more(engines, monkeypatch):
    state = engines[0].engine.intake._grammars.compile(StructuredOutputsParams(regex="[a-z]{400}")).start(guesses=True)
    compute, masks = GrammarState.mask, []
    monkeypatch.setattr(GrammarState, "mask", lambda self: (state._is_current or masks.append(1), compute(self))[1])
    (allowed,) = np.nonzero(np.unpackbits(state.mask().view(np.uint8), bitorder="little"))
    fits, forbidden = int(allowed[0]), int(np.setdiff1d(np.arange(300), allowed)[0])
    assert not state.accept(fits)

    def masks_of(sampled: list[int]) -> list[int]:
        """How many masks each of these tokens has, where the grammar allows no other that is listed."""
        counts = []
        for token_id in sampled:
            masks.clear()
            state.prepare()
            if not state.allows(token_id):
                assert state.first_allowed([token_id]) is None
            state.accept(fits)
            counts.append(len(masks))
        return counts

    assert masks_of([fits, forbidden, fits, fits, forbidden, fits]) == [0, 1, 0, 0, 1, 0]
    assert masks_of([forbidden, forbidden, fits, fits]) == [1, 1, 1, 0]
    assert sum(masks_of([forbidden] * 70)) == 70


def test_a_grammar_that_gives_up_as_a_token_is_checked_says_so_when_it_takes_the_token_in(engines, monkeypatch):
    """Checking is within a step, and an error there would end the step for all."""
    grammar = replace(engines[0].engine.intake._grammars.compile(GRAMMARS[4]), few_behind={})
    state, error = grammar.start(guesses=True), RequestError("the grammar gave up, make it simpler: too big")
    monkeypatch.setattr(state, "mask", lambda: (_ for _ in ()).throw(error))
    state.prepare()
    forbidden = next(token_id for token_id in range(300) if not state.allows(token_id))
    assert state.first_allowed([forbidden]) is not None
    with pytest.raises(RequestError, match="too big"):
        state.accept(forbidden)


def test_a_grammar_that_gives_up_behind_a_token_has_not_ended(engines):
    """llguidance's matcher is stopped where it has an error; an output that ends so would pass for a valid one."""
    state = engines[0].engine.intake._grammars.compile(GRAMMARS[4]).start()
    state._matcher = SimpleNamespace(
        consume_token=lambda _: True, is_stopped=lambda: True, is_error=lambda: True, get_error=lambda: "error: too big"
    )
    with pytest.raises(RequestError, match="too big"):
        state.accept(5)


def test_masks_come_beforehand_behind_tokens_where_few_others_were_allowed(engines):
    """In all outputs of a grammar, until many are allowed there as often as it is worth."""
    intake = engines[0].engine.intake
    grammar = intake._grammars.compile(StructuredOutputsParams(regex="(x[01]){2}x[a-z0-9]{40}"))
    x, one = (intake.encode(text, add_special_tokens=False)[0] for text in ("x", "1"))

    def looks(known):
        state = grammar.start(guesses=True)
        assert not any(map(state.accept, known))
        state.prepare()
        is_open = state.is_open
        if is_open and not state.allows(x):
            other_token(state, np.zeros((1, len(state.allowed) * 64), np.float32), 0, lambda row, count: [x] * count)
        return is_open

    assert [looks([x]), looks([x]), looks([x, one, x])] == [True, False, False]
    assert [looks([x, one, x, one, x]) for _ in range(5)] == [False] * MAX_EXPECTED + [True]
    assert [looks([x]), looks([x])] == [True, False]
