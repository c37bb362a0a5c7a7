"""Pitfalls of speculative decoding that change an output: what is sampled, where it ends, what is told of it.

On equals off, bit for bit. The numbers are those of the table in docs/drafting-pitfalls.md.
"""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build

import ridgeline.decoding.strategies.speculative as speculative
from drafting import TINY, Known, Oracle, TreeOracle, known_outputs, prompts_of, verified
from planting import Pitfalls, World
from ridgeline import LLM, SamplingParams
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.decoding import rejection, sampling
from ridgeline.decoding.strategies.speculative import Speculative
from ridgeline.engine import batch
from ridgeline.engine.committing import StepCommit
from ridgeline.engine.render import Renderer
from ridgeline.engine.request import FinishReason
from ridgeline.text.grammar import GrammarState

pytestmark = pytest.mark.skipif(
    find_spec("ridgeline._native") is None, reason="only native code computes a row alike in every batch"
)
PITFALLS = Pitfalls()
EOS = 0  # of the bundled models
STORY = [1, 403, 407, 261, 378]
SEEDED = SamplingParams(temperature=0.9, seed=4, top_p=0.95, max_tokens=30, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def completions(outputs):
    return [(list(c.token_ids), c.text, c.finish_reason, c.stop_reason, c.logprobs) for o in outputs for c in o.outputs]


def tiny(world):
    return world.once("tiny", lambda: build("llama", 3, world.folder / "tiny"))


def on_is_off(world, name, params, model=None, prompts=None, options=None, oracle=Oracle, **given):
    """Compare an engine that verifies an oracle's drafts with one that makes none; returns the former."""
    if model is None:
        model, prompts = str(tiny(world).folder.path), prompts_of(tiny(world))
    options = TINY | (options or {})
    off, known = world.once(name, lambda: known_outputs(LLM(model, **options), prompts, params, **given))
    llm = LLM(model, **options)
    strategy = verified(llm, known, oracle=oracle)
    assert completions(llm.generate(prompts, params, use_tqdm=False, **given)) == completions(off)
    counts = strategy.drafts()["oracle"]
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    return llm


def stories(world):
    return {
        "model": str(world.shared_data / "models/stories260K"),
        "prompts": [STORY, STORY[:3], [1, 360, 266]],
        "options": {"max_model_len": 256, "max_num_batched_tokens": 128},
    }


# ---- what is sampled


@PITFALLS.check(4)
def a_token_is_sampled_once(world):
    on_is_off(world, "seeded", SEEDED)
    on_is_off(world, "tree", SEEDED, oracle=TreeOracle)


@PITFALLS.bug(4, "two samples for one node of a tree: a child counts that a second one would be")
def second_sample(monkeypatch):
    def lenient(span, sampled):
        way = followed(span, sampled)
        newest = span.num_tokens - span.num_optional - 1
        at = way[-1] if way else newest
        again = [i for i, parent in enumerate(span.parents, newest + 1) if parent == at and span.token_ids[i] % 3 == 0]
        return [*way, *again[:1]]

    followed = speculative.followed
    monkeypatch.setattr(speculative, "followed", lenient)


@PITFALLS.bug(4, "a node of a tree has the random number of its place among the rows")
def word_by_row(monkeypatch):
    tree_rows = speculative.tree_rows

    def numbered(span, first, grammar):
        rows = tree_rows(span, first, grammar)
        return [row._replace(num_output=first.num_output + i) for i, row in enumerate(rows)]

    monkeypatch.setattr(speculative, "tree_rows", numbered)


@PITFALLS.bug(4, "the token behind the accepted ones is sampled again")
def redraw(monkeypatch):
    accept, sample_row, redrawn = Speculative.accept, speculative.sample_row, []

    def again(self, view, span, sampled):
        accepted = accept(self, view, span, sampled)
        if len(accepted.tokens) <= 1 or len(accepted.tokens) > span.num_optional:
            return accepted
        redrawn.append(1)
        return accepted._replace(tokens=accepted.tokens[:-1], num_final=accepted.num_final - 1)

    monkeypatch.setattr(Speculative, "accept", again)
    monkeypatch.setattr(
        speculative,
        "sample_row",
        lambda *given: (row := sample_row(*given))._replace(seed=row.seed + len(redrawn)),
    )


@PITFALLS.check(5)
def every_processor_holds_for_every_row(world):
    processed = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3, "min_p": 0.02}
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, logit_bias={3: 2.0, 7: -4.0}, **processed, **sampling)
        for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 1}, {"temperature": 1.1, "seed": 2})
    ]
    on_is_off(world, "processors", params)
    ends = on_is_off(world, "end", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    output = ends.generate(prompts_of(tiny(world))[:1], GREEDY, use_tqdm=False)[0].outputs[0]
    early = SamplingParams(temperature=0, max_tokens=30, min_tokens=12, stop_token_ids=list(output.token_ids[3:9]))
    on_is_off(world, "min tokens", early)


def change_rows(monkeypatch, change):
    """Give the rows of a draft what `change` says of the span's first row and the tokens drafted before them."""
    rows_along = rejection.rows_along

    def changed(first, drafted):
        rows = rows_along(first, drafted)
        return [rows[0], *(row._replace(**change(first, drafted[:i])) for i, row in enumerate(rows[1:], 1))]

    monkeypatch.setattr(rejection, "rows_along", changed)


@PITFALLS.bug(5, "penalties do not count the draft")
def no_history(monkeypatch):
    change_rows(monkeypatch, lambda first, drafted: {"output_ids": first.output_ids})


@PITFALLS.bug(5, "rows behind the first have no bias")
def no_bias(monkeypatch):
    def plain(first, drafted):
        return {"params": SamplingParams(temperature=first.params.temperature, seed=first.params.seed)}

    change_rows(monkeypatch, plain)


@PITFALLS.bug(5, "min_tokens holds for the first row alone")
def ends_not_banned(monkeypatch):
    change_rows(
        monkeypatch,
        lambda first, drafted: {"params": replace(first.params, min_tokens=0), "stop_ids": ()},
    )


@PITFALLS.check(6)
def every_place_has_a_random_number_of_its_own(world):
    """Of several outputs and in a batch as alone; no two rows that are kept share one."""
    llm = on_is_off(world, "n", SamplingParams(temperature=0.9, seed=4, n=3, max_tokens=30, ignore_eos=True))
    prompts, words, plan = prompts_of(tiny(world)), [], llm.engine.loop.scheduler.plan

    def watched():
        planned = plan()
        words.append([(row.seed, row.num_output) for row in planned.samples] if planned else [])
        return planned

    llm.engine.loop.scheduler.plan = watched
    unseeded = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, n=2)
    llm.generate(prompts, unseeded, use_tqdm=False)
    assert all(len(step) == len(set(step)) for step in words)
    alone = [on_is_off(world, f"seeded {i}", SEEDED, str(tiny(world).folder.path), [p]) for i, p in enumerate(prompts)]
    assert len(alone) == len(prompts)


@PITFALLS.bug(6, "all rows of a span have the first one's number")
def one_word(monkeypatch):
    change_rows(monkeypatch, lambda first, drafted: {"num_output": first.num_output})


@PITFALLS.bug(6, "drafted rows of all requests have one stream")
def one_stream(monkeypatch):
    change_rows(monkeypatch, lambda first, drafted: {"seed": 4 if drafted else first.seed})


# ---- where it ends


@PITFALLS.check(7)
def an_output_ends_where_it_would_without_drafts(world):
    """Stop ids, stop strings and lengths within a run of accepted tokens; a stop comes before the length."""
    story = stories(world)
    greedy = {"temperature": 0, "ignore_eos": True}
    off, _ = world.once(
        "whole",
        lambda: known_outputs(
            LLM(story["model"], **TINY | story["options"]),
            story["prompts"],
            SamplingParams(max_tokens=80, logprobs=1, **greedy),
        ),
    )
    text, tokens = off[0].outputs[0].text, list(off[0].outputs[0].token_ids)
    place = next(i for i in range(12, 60) if tokens[i] not in tokens[:i])
    for name, more in {
        "string": {"stop": text.split()[9] + " " + text.split()[10]},
        "shown": {"stop": text[30:36], "include_stop_str_in_output": True},
        "id": {"stop_token_ids": [tokens[place]]},
        "id at the length": {"stop_token_ids": [tokens[place]], "max_tokens": place + 1},
        "length": {"max_tokens": 33},
        "not yet": {"stop_token_ids": tokens[2:6], "min_tokens": 20},
        "string not yet": {"stop": text.split()[3], "min_tokens": 20},
    }.items():
        params = SamplingParams(**{"max_tokens": 60, "logprobs": 1} | greedy | more)
        llm = on_is_off(world, f"stop: {name}", params, **story)
        _, records = llm.engine.loop.journal.outputs.read()
        found, _ = world.once(f"stop: {name}", lambda: None)
        reason = "length" if name == "length" else "stop"
        assert found[0].outputs[0].finish_reason == reason, f"{name}: a stop comes before the length"
        counted = sorted(len(c.token_ids) for o in found for c in o.outputs)
        assert sorted(records["num_output"].tolist()) == counted, "usage counts what was delivered"


@PITFALLS.bug(7, "the length is asked before the stop")
def length_first(monkeypatch):
    append = StepCommit._append

    def cut(self, seq, token):
        ends = append(self, seq, token)
        longest = len(seq.token_ids) - len(seq.request.prompt_ids) >= seq.request.max_tokens
        return FinishReason.LENGTH if longest else ends

    monkeypatch.setattr(StepCommit, "_append", cut)


@PITFALLS.bug(7, "tokens behind the end are told")
def behind_the_end(monkeypatch):
    def extend(self, seq, tokens):
        return next((end for end in [self._append(seq, token) for token in tokens] if end is not None), None)

    monkeypatch.setattr(StepCommit, "_extend", extend)


@PITFALLS.bug(7, "tokens behind a stop string are told")
def behind_the_string(monkeypatch):
    token, last = Renderer._token, {}

    def later(self, rendered, request, index, token_id, logprob, *, ends):
        key = request.request_id, index
        was_found = last.pop(key, False)
        token(self, rendered, request, index, token_id, logprob, ends=ends)
        if key in rendered.stopped and not was_found:
            del rendered.stopped[key]
            last[key] = True

    monkeypatch.setattr(Renderer, "_token", later)


@PITFALLS.check(8)
def a_grammar_follows_what_was_accepted(world):
    """Drafts break it, finish it and go on behind its end."""
    model = world.once("python-1m", lambda: LLM("python-1m", max_model_len=128, deterministic=True))
    prompts = ["def f(x):", "x = {"]
    for name, rule in (
        ("regex", StructuredOutputsParams(regex=r"(ab|c){2,5}\.[0-9]{3}")),
        ("choice", StructuredOutputsParams(choice=("positive", "negative"))),
        ("open end", StructuredOutputsParams(regex="[a-c]+")),
    ):
        likely = {EOS: 8.0} if name == "open end" else {}  # an end that the model samples, and drafts go on behind it
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, structured_outputs=rule, logit_bias=likely)
        off, known = world.once(f"grammar {name}", lambda params=params: known_grammar(model, prompts, params))
        llm = LLM("python-1m", max_model_len=128, deterministic=True)
        strategy = verified(llm, known, right=0.7)
        assert completions(llm.generate(prompts, params, use_tqdm=False)) == completions(off)
        assert strategy.drafts()["oracle"].num_accepted_tokens > 0
        assert not likely or any(o.outputs[0].token_ids[-1] == EOS for o in off)


def known_grammar(llm, prompts, params):
    """Outputs, and drafts of them that go on behind their ends."""
    scheduler, known = llm.engine.loop.scheduler, Known()
    strategy, scheduler.strategy = scheduler.strategy, known
    found = llm.generate(prompts, params, use_tqdm=False)
    scheduler.strategy = strategy
    known.outputs = {key: [*tokens, *tokens[:3]] for key, tokens in known.outputs.items()}
    return found, known


@PITFALLS.bug(8, "a draft is not cut where it breaks the grammar")
def not_cut(monkeypatch):
    monkeypatch.setattr(GrammarState, "fitting", lambda self, token_ids: token_ids)


@PITFALLS.bug(8, "the mask of a row is that of the row before")
def mask_before(monkeypatch):
    masks = GrammarState.masks
    monkeypatch.setattr(
        GrammarState, "masks", lambda self, draft: (found := masks(self, draft)) and [found[0], *found[:-1]]
    )


# ---- what is told


@PITFALLS.check(17)
def log_probabilities_are_those_of_the_accepted_rows(world):
    on_is_off(world, "logprobs", SamplingParams(temperature=0, logprobs=5, max_tokens=30, ignore_eos=True))
    penalties = {"repetition_penalty": 1.3, "logit_bias": {5: 3.0}}
    params = SamplingParams(temperature=0.9, seed=3, logprobs=5, max_tokens=30, ignore_eos=True, **penalties)
    on_is_off(world, "logprobs after penalties", params)
    plain, changed = (world.once(name, lambda: None)[0] for name in ("logprobs", "logprobs after penalties"))
    for one, other in zip(plain, changed, strict=True):
        first, same = (output.outputs[0].logprobs[0] for output in (one, other))
        assert first.top[:5] == same.top[:5], "told of the raw distribution, whatever the processors did"


@PITFALLS.bug(17, "those of the row before")
def logprobs_before(monkeypatch):
    requested = sampling._requested_logprobs

    def before(logits_RV, rows, token_ids):
        moved = [row._replace(row=max(row.row - 1, 0)) for row in rows]
        return requested(logits_RV, moved, token_ids)

    monkeypatch.setattr(sampling, "_requested_logprobs", before)


@PITFALLS.bug(17, "after the processors have written over the logits")
def logits_written_to(monkeypatch):
    monkeypatch.setattr(sampling, "_own", lambda logits_GV: logits_GV)


def adapted(world):
    """A model's folder, and two adapters of it."""
    model = tiny(world)
    generator, found = torch.Generator().manual_seed(1), {}
    for name in ("a", "b"):
        folder, tensors = world.folder / name, {}
        folder.mkdir(exist_ok=True)
        for stored, tensor in load_file(model.folder.path / "model.safetensors").items():
            if not stored.endswith(("q_proj.weight", "v_proj.weight")):
                continue
            module = "base_model.model." + stored.removesuffix(".weight")
            outputs, inputs = tensor.shape
            tensors[f"{module}.lora_A.weight"] = torch.randn(4, inputs, generator=generator)
            tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator)
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "bias": "none", "use_dora": False}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        found[name] = str(folder)
    return str(model.folder.path), found


@PITFALLS.check(18)
def rows_have_the_adapter_of_their_sequence(world):
    model, adapters = world.once("adapters", lambda: adapted(world))
    prompts, names = prompts_of(tiny(world)), ["a", None, "b"]
    llm = on_is_off(world, "adapted", GREEDY, model, prompts, {"adapters": adapters}, adapter=names)
    turned = [*names[1:], *names[:1]]  # steps of the same shapes, and other adapters
    others, known = world.once(
        "turned", lambda: known_outputs(LLM(model, **TINY, adapters=adapters), prompts, GREEDY, adapter=turned)
    )
    verified(llm, known)
    assert completions(llm.generate(prompts, GREEDY, adapter=turned, use_tqdm=False)) == completions(others)
    off, _ = world.once("adapted", lambda: None)
    plain, _ = world.once("not adapted", lambda: known_outputs(LLM(model, **TINY), prompts, GREEDY))
    same = [one == other for one, other in zip(completions(off), completions(plain), strict=True)]
    assert same == [False, True, False]


@PITFALLS.bug(18, "adapters by sequence, one after the other")
def by_sequence(monkeypatch):
    make = batch.BatchBuilder.build

    def built(self, plan, sampling):
        found = make(self, plan, sampling)
        if found.adapters_T is not None:
            found.adapters_T[:] = 0
            found.adapters_T[: len(plan.spans)] = [span.adapter for span in plan.spans]
        return found

    monkeypatch.setattr(batch.BatchBuilder, "build", built)


@PITFALLS.bug(18, "drafts are verified without the adapter")
def unadapted(monkeypatch):
    next_span = Speculative.next_span

    def bare(self, view, max_tokens, *, score_all):
        span = next_span(self, view, max_tokens, score_all=score_all)
        return span._replace(adapter=0) if span is not None and span.num_optional else span

    monkeypatch.setattr(Speculative, "next_span", bare)


@PITFALLS.check(22)
def what_differs_without_deterministic_mode_is_a_near_tie(world):
    """Products of several rows may round otherwise: the first token that differs was nearly as likely."""
    story = stories(world)
    options = TINY | story["options"] | {"deterministic": False, "dtype": "bfloat16"}
    params = SamplingParams(temperature=0, max_tokens=120, logprobs=2, ignore_eos=True)
    off, known = world.once(
        "near ties", lambda: known_outputs(LLM(story["model"], **options), story["prompts"], params)
    )
    llm = LLM(story["model"], **options)
    verified(llm, known)
    for one, other in zip(llm.generate(story["prompts"], params, use_tqdm=False), off, strict=True):
        ours, theirs = list(one.outputs[0].token_ids), list(other.outputs[0].token_ids)
        assert len(ours) == len(theirs)
        place = next((i for i in range(len(ours)) if ours[i] != theirs[i]), None)
        if place is not None:
            best, second = sorted((logprob for _, logprob in other.outputs[0].logprobs[place].top), reverse=True)[:2]
            assert best - second < 2**-5
    on_is_off(world, "deterministic bfloat16", GREEDY, **story | {"options": options | {"deterministic": True}})


@PITFALLS.bug(22, "one token more is accepted than was right")
def one_more(monkeypatch):
    accept = Speculative.accept

    def generous(self, view, span, sampled):
        accepted = accept(self, view, span, sampled)
        right = len(accepted.tokens) - 1
        if right >= span.num_optional:
            return accepted
        wrong = span.token_ids[span.num_tokens - span.num_optional + right]
        return accepted._replace(tokens=[*accepted.tokens[:-1], accepted.tokens[-1]._replace(token_id=wrong)])

    monkeypatch.setattr(Speculative, "accept", generous)


@pytest.fixture(scope="module")
def world(tmp_path_factory, shared_data):
    return World(tmp_path_factory.mktemp("pitfalls"), shared_data)


test_pitfall, test_a_planted_bug_is_caught = PITFALLS.tests()
