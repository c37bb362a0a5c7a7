"""Structured output through the real engine: valid whenever it ended by itself, and the same however it is computed."""

import json
import re
from importlib.util import find_spec

import pytest

from preemption import generate_with_preemption
from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import RequestError
from ridgeline.core.params import StructuredOutputsParams

pytestmark = pytest.mark.skipif(find_spec("ridgeline._native") is None, reason="needs the native backend")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 2},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
KINDS = {
    "json": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "regex": StructuredOutputsParams(regex=r"(ab|c){2,5}\.[0-9]{3}"),
    "choice": StructuredOutputsParams(choice=("positive", "negative", 'n/"a')),
    "gbnf": StructuredOutputsParams(grammar='root ::= item ("," item){1,3}\nitem ::= [a-f]{2}'),
    "lark": StructuredOutputsParams(grammar='start: "<" WORD ">"\nWORD: /[a-z]{2,4}/'),
}
PROMPTS = ["def f(x):", "x = {", "import os\n"]


def valid(kind: str, text: str) -> bool:
    if kind == "json":
        value = json.loads(text)
        assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text)), "white space, which was not allowed"
        assert set(value) == set(SCHEMA["required"]) and len(value["name"]) <= 12 and value["tags"] == value["tags"][:2]
        return set(value["tags"]) <= {"x", "yy"} and 0 <= value["age"] <= 99
    patterns = {"regex": r"(ab|c){2,5}\.[0-9]{3}", "gbnf": r"[a-f]{2}(,[a-f]{2}){1,3}", "lark": "<[a-z]{2,4}>"}
    return text in KINDS["choice"].choice if kind == "choice" else bool(re.fullmatch(patterns[kind], text))


def params(kind: str, **more) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 80, "temperature": 1.0, "seed": 1} | more), structured_outputs=KINDS[kind])


def completions(outputs):
    return [(list(c.token_ids), c.text, c.finish_reason) for output in outputs for c in output.outputs]


@pytest.fixture(scope="module")
def llm():
    return LLM("python-1m", max_model_len=256)


@pytest.fixture(scope="module")
def alone(llm):
    """Every prompt of every kind by itself."""
    return {kind: [completions(llm.generate([p], params(kind), use_tqdm=False))[0] for p in PROMPTS] for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_what_ends_is_valid(alone, kind):
    for _, text, reason in alone[kind]:
        assert reason == "stop" and valid(kind, text), text


def test_a_batch_of_all_kinds_beside_free_text_is_each_alone(llm, alone):
    kinds = [*KINDS, None]
    batch = [(prompt, kind) for kind in kinds for prompt in PROMPTS]
    free = SamplingParams(max_tokens=30, temperature=1.0, seed=1)
    outputs = llm.generate([p for p, _ in batch], [params(k) if k else free for _, k in batch], use_tqdm=False)
    assert completions(outputs)[: -len(PROMPTS)] == [one for kind in KINDS for one in alone[kind]]
    plain = llm.generate(PROMPTS, free, use_tqdm=False)
    assert completions(outputs)[-len(PROMPTS) :] == completions(plain)


def test_preempted_ones_go_on_where_they_were(llm, alone):
    all_params = [params(kind) for kind in KINDS for _ in PROMPTS]
    outputs = generate_with_preemption(llm, PROMPTS * len(KINDS), all_params)
    assert completions(outputs) == [one for kind in KINDS for one in alone[kind]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(alone, llm, temperature):
    """Drafts come from a prompt that holds the answer, and wrong ones: the grammar follows what was accepted."""
    prompts = [
        'x = {"name":"ab","tags":["x","yy"],"age":1}\ny = {"name":"ab","tags":["x","x"],"age":12}\nz = ',
        *PROMPTS,
    ]
    asked = [params(kind, temperature=temperature, ignore_eos=False) for kind in KINDS for _ in prompts]
    plain = completions(llm.generate(prompts * len(KINDS), asked, use_tqdm=False))
    drafting = LLM("python-1m", max_model_len=256, speculate="ngram", adaptive_speculation=False, prompt_lookup_min=1)
    assert completions(drafting.generate(prompts * len(KINDS), asked, use_tqdm=False)) == plain
    drafts = drafting.engine.loop.stats().drafts
    assert sum(stats.num_accepted_tokens for stats in drafts.values()) > 0


def test_all_blocks_of_what_ended_by_its_grammar_are_cached(llm):
    """Wherever in a block it ends: what is computed is all but its last token."""
    ended = StructuredOutputsParams(regex="[a-z]( [a-z]){40}")
    size = llm.engine.loop.scheduler.cache.layout.block_size
    prompts = [[9, length, *[8] * length] for length in range(5, 5 + size)]
    params = SamplingParams(temperature=0, max_tokens=120, structured_outputs=ended)
    outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    again = llm.generate([[*text, 7] for text in texts], SamplingParams(temperature=0, max_tokens=1))
    assert [one.num_cached_tokens for one in again] == [(len(text) - 1) // size * size for text in texts]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculate", ["forced", "auto"])
def test_what_a_grammar_forces_is_drafted_first_and_always_right(alone, llm, temperature, speculate):
    asked = [params(kind, temperature=temperature, ignore_eos=False) for kind in KINDS for _ in PROMPTS]
    plain = completions(llm.generate(PROMPTS * len(KINDS), asked, use_tqdm=False))
    drafting = LLM("python-1m", max_model_len=256, speculate=speculate, adaptive_speculation=False)
    assert completions(drafting.generate(PROMPTS * len(KINDS), asked, use_tqdm=False)) == plain
    stats = drafting.engine.loop.stats().drafts["forced"]
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20


def test_outputs_of_one_prompt_follow_the_grammar_on_their_own(llm):
    (output,) = llm.generate("x = ", params("regex", n=4, logprobs=2), use_tqdm=False)
    assert all(c.finish_reason == "stop" and valid("regex", c.text) for c in output.outputs)
    assert len({c.text for c in output.outputs}) > 1
    assert all(len(c.logprobs) == len(c.token_ids) for c in output.outputs)


def test_other_rules_of_sampling_hold_beside_it(llm):
    """Such rows are decided by the sampler, all others within the step."""
    for more in ({"min_tokens": 12}, {"repetition_penalty": 1.2}, {"logit_bias": {30: 5.0}}, {"ignore_eos": True}):
        (output,) = llm.generate("x = ", params("json", **more), use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop" and valid("json", output.outputs[0].text)
    (output,) = llm.generate("x = ", params("json", stop='"tags"', max_tokens=60), use_tqdm=False)
    assert '"tags"' not in output.outputs[0].text and output.outputs[0].stop_reason == '"tags"'


def test_a_length_cuts_it_off(llm):
    (output,) = llm.generate("x = ", params("json", max_tokens=3), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "string", "format": "iri"}}, "iri"),
        ({"json": {"$ref": "#"}}, "json cannot be followed"),
        ({"json": {"x-guidance": {"lenient": True}, "uniqueItems": True}}, "x-guidance"),
        ({"json": '{"type": '}, "not valid JSON"),
        ({"json": {"description": "a" * 70_000}}, "characters"),
        ({"json": json.loads('{"items":' * 70 + "{}" + "}" * 70)}, None),
        ({"json": json.loads('{"items":' * 200 + "{}" + "}" * 200)}, "nested"),
        ({"json": {"properties": {f"p{i}": {} for i in range(2001)}}}, "2001 properties"),
        ({"json": {"type": "object", "required": ["a"], "properties": {"a": False}}}, "json cannot be followed"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "("}, "regex cannot be followed"),
        ({"grammar": "root ::= other"}, "grammar cannot be followed"),
        ({"choice": ["a"] * 1001}, "at most 1000"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(llm, given, words):
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(**given))
    if words is None:
        llm.engine.intake.request([1], asked)
        return
    with pytest.raises(RequestError, match=re.escape(words)) as refused:
        llm.engine.intake.request([1], asked)
    assert len(str(refused.value)) < 400 and "<state>" not in str(refused.value)


def test_exactly_one_constraint():
    for given in ({}, {"regex": "a", "choice": ["b"]}, {"json": {}, "json_object": True}):
        with pytest.raises(RequestError, match="exactly one of"):
            StructuredOutputsParams(**given)
