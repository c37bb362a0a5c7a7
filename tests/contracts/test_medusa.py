"""Published Medusa heads: they load, guess what a plain torch implementation guesses, and change no output."""

import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import oracle_heads
import pytest
import torch
from test_drafts_in_the_engine import assert_same_outputs, completions

from drafting import TINY, drafter_of, prompts_of
from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.decoding.drafters.medusa import Medusa
from ridgeline.decoding.trees import KNOWN

pytestmark = pytest.mark.skipif(
    find_spec("ridgeline._native") is None, reason="only native code computes a row alike in every batch"
)
FIXED = {"adaptive_speculation": False, "num_speculative_tokens": 6, "draft_quantize": "none"}
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
HEADS = {
    "paper": lambda model: oracle_heads.Medusa(model, "paper"),
    "merged, two layers": lambda model: oracle_heads.Medusa(model, "merged", 3, 2),
    "vllm, no bias": lambda model: oracle_heads.Medusa(model, "vllm", bias=False),
    "vllm, shared": lambda model: oracle_heads.Medusa(model, "vllm", 3, 2, shared=True),
    "one head": lambda model: oracle_heads.Medusa(model, "paper", 1),
}


def fitted(head, plain):
    """Heads that guess much of what follows the first prompt."""
    prompt = prompts_of(head.model)[0]
    (output,) = plain.generate([prompt], GREEDY, use_tqdm=False)
    head.fit([*prompt, *output.outputs[0].token_ids], len(prompt))
    return head


def wrong_drafts(head, target, folder, **options):
    """How many trees of how many have other branches than the plain implementation's best, round after round."""
    llm = LLM(str(target.folder.path), **TINY | options, speculate=f"medusa:{head.write(folder)}", **FIXED)
    drafter, found = drafter_of(llm), []
    draft = drafter.draft

    def recording(asked, max_catch_up):
        drafts = draft(asked, max_catch_up)
        found.extend((list(r.view.token_ids), drafts[r.view.seq_id]) for r in asked)
        return drafts

    drafter.draft = recording
    llm.generate(prompts_of(target), GREEDY, use_tqdm=False)
    assert any(0 in drafted.parents for _, drafted in found) or head.num_heads == 1, "a second token in a row"
    assert any(list(drafted.parents).count(KNOWN) > 1 for _, drafted in found), "a second token for one place"
    return sum(is_wrong(drafted, head.ranked(token_ids)) for token_ids, drafted in found), len(found)


def is_wrong(drafted, ranked):
    """Whether what follows any token of a tree is not the best of its head."""
    depths, children = {KNOWN: 0}, {}
    for index, (token, parent) in enumerate(zip(drafted.token_ids, drafted.parents, strict=True)):
        depths[index] = depths[parent] + 1
        children.setdefault(parent, []).append(token)
    return any(tokens != ranked[depths[parent]][: len(tokens)] for parent, tokens in children.items())


@pytest.mark.parametrize("name", HEADS)
def test_heads_draft_what_a_plain_implementation_drafts(name, target, tmp_path):
    """Round after round: a rejected draft's hidden states are not drafted from."""
    wrong, drafted = wrong_drafts(HEADS[name](target), target, tmp_path)
    assert wrong == 0
    assert drafted > 20


def test_heads_on_the_reference_backend(target, tmp_path):
    wrong, drafted = wrong_drafts(
        HEADS["vllm, shared"](target), target, tmp_path, backend="reference", deterministic=False
    )
    assert wrong == 0
    assert drafted > 20


def of_the_span_s_end(self, running, plan, taps):
    """Take in hidden states of drafted tokens, rejected ones too."""
    ends = np.cumsum([span.num_tokens for span in plan.spans])
    views = {view.seq_id: view for view in running}
    for span, end in zip(plan.spans, ends, strict=True):
        if span.seq_id in views:
            self._hidden[span.seq_id] = views[span.seq_id].num_computed, taps[-1][end - 1].copy()


PLANTED = {
    "a rejected token's hidden state": (Medusa, "observe", of_the_span_s_end),
    "the last hidden state of long ago": (Medusa, "_knows", lambda self, view: True),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_seen(bug, target, tmp_path, monkeypatch):
    if "long ago" in bug:
        observe = Medusa.observe
        monkeypatch.setattr(
            Medusa, "observe", lambda self, running, plan, taps: plan.step % 2 or observe(self, running, plan, taps)
        )
    monkeypatch.setattr(*PLANTED[bug])
    wrong, _ = wrong_drafts(HEADS["paper"](target), target, tmp_path)
    assert wrong > 0


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5, "max_num_seqs": 5}], ids=["", "chunked"])
@pytest.mark.parametrize("name", ["paper", "vllm, shared"])
def test_heads_change_no_output(name, options, target, plain, tmp_path):
    """Alone, batched, in chunks, from cached prefixes, preempted; greedy and seeded, with several outputs."""
    folder = fitted(HEADS[name](target), plain).write(tmp_path)
    llm = LLM(str(target.folder.path), **TINY | options, speculate=f"medusa:{folder}", **FIXED)
    assert_same_outputs(llm, plain, prompts_of(target))
    stats = llm.engine.loop.scheduler.strategy.drafts()["medusa"]
    assert 20 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert not drafter_of(llm)._hidden


def test_quantized_heads_keep_to_match_without_a_seed(target, plain, tmp_path):
    """A draft that is not sampled is never verified by rejection."""
    folder = fitted(HEADS["paper"](target), plain).write(tmp_path)
    sizes = {key: value for key, value in TINY.items() if key not in ("deterministic", "dtype")}
    options = {"speculate": f"medusa:{folder}", "draft_sample_method": "probabilistic", "quantize": "int8"}
    llm = LLM(str(target.folder.path), **sizes, **options, **FIXED)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True)
        outputs = llm.generate(prompts_of(target), params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [40] * 3
    stats = llm.engine.loop.scheduler.strategy.drafts()["medusa"]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_drafts_that_do_not_pay_are_left_out(target, plain, tmp_path):
    """With the options' defaults the output is the same."""
    folder = HEADS["paper"](target).write(tmp_path)
    llm = LLM(str(target.folder.path), **TINY, speculate=f"medusa:{folder}")
    expected = completions(plain.generate(prompts_of(target), GREEDY, use_tqdm=False))
    assert completions(llm.generate(prompts_of(target), GREEDY, use_tqdm=False)) == expected


def test_vllm_s_config_is_taken(target, plain, tmp_path):
    given = {"method": "medusa", "model": str(HEADS["paper"](target).write(tmp_path)), "num_speculative_tokens": 3}
    llm = LLM(str(target.folder.path), **TINY, speculative_config=json.dumps(given | {"adaptive": False}))
    expected = completions(plain.generate(prompts_of(target), GREEDY, use_tqdm=False))
    assert completions(llm.generate(prompts_of(target), GREEDY, use_tqdm=False)) == expected
    assert llm.engine.loop.scheduler.strategy.drafts()["medusa"].num_draft_tokens > 0


BAD = [
    ("key", lambda head: {"config": {"no_such_key": 3}}, ConfigError, "no_such_key=3"),
    ("flag", lambda head: {"config": {"original_lm_head": 3}}, ConfigError, "original_lm_head=3 .* true or false"),
    ("tensor", lambda head: {"tensors": {"0.7.weight": torch.ones(2)}}, ModelLoadError, "0.7.weight is not understood"),
    (
        "missing layer",
        lambda head: {"tensors": {"1.0.linear.bias": None}},
        ModelLoadError,
        "heads.1.layers.0.bias is m",
    ),
    ("torn", lambda head: {"tensors": {"0.1.linear.weight": torch.ones(36, 36)}}, ModelLoadError, "no Medusa heads"),
    ("missing head", lambda head: {"tensors": {"2.1.weight": None}}, ModelLoadError, "heads.2.head.weight is missing"),
    ("no heads", lambda head: {"tensors": {"0.1.weight": None}}, ModelLoadError, "has no Medusa heads"),
    ("gap", lambda head: {"tensors": {"9.0.linear.weight": torch.ones(2)}}, ModelLoadError, "9.0.linear.weight is not"),
    ("dtype", lambda head: {"tensors": {"0.0.linear.bias": torch.ones(2, dtype=torch.int8)}}, ModelLoadError, "is I8"),
    ("map", lambda head: {"tensors": {"token_map": torch.ones(2, 2)}}, ModelLoadError, "4 token ids are not those of"),
    ("ids", lambda head: {"tensors": {"token_map": head.ids + 1}}, ModelLoadError, "token ids are not those of"),
    (
        "vocabulary",
        lambda head: {"tensors": {"0.1.weight": torch.ones(7, head.model.spec.hidden_size)}},
        ConfigError,
        "hidden size .* and 7 tokens, and this one has",
    ),
    ("config's vocabulary", lambda head: {"config": {"vocab_size": 7}}, ConfigError, "and 7 tokens, and this one has"),
    (
        "matrix",
        lambda head: {
            "config": {"vocab_size": head.model.spec.vocab_size, "hidden_size": head.model.spec.hidden_size},
            "tensors": {"0.1.weight": torch.ones(7, 16)},
        },
        ModelLoadError,
        r"0.1.weight is F32 \[7, 16\] instead of",
    ),
    ("hidden size", lambda head: {"tensors": {"0.1.weight": torch.ones(7, 16)}}, ConfigError, "of hidden size 16"),
]


@pytest.mark.parametrize(("change", "error", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_heads_that_do_not_fit_are_refused_in_one_line(change, error, message, target, tmp_path):
    head = HEADS["paper"](target)
    with pytest.raises(error, match=message) as caught:
        LLM(str(target.folder.path), **TINY, speculate=f"medusa:{head.write(tmp_path, **change(head))}", **FIXED)
    assert "\n" not in str(caught.value)


def test_a_pickled_file_is_refused_with_the_line_that_converts_it(target, tmp_path):
    """That line makes the folder load."""
    head = HEADS["paper"](target)
    folder = head.write(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save(head.t, folder / "medusa_lm_head.pt")
    for name in (folder, folder / "medusa_lm_head.pt"):
        with pytest.raises(
            ModelLoadError, match="Medusa heads are read from safetensors alone; convert them with: "
        ) as caught:
            LLM(str(target.folder.path), **TINY, speculate=f"medusa:{name}", **FIXED)
        assert "\n" not in str(caught.value)
    line = re.search("with: python (.*)", str(caught.value))[1]
    subprocess.run([sys.executable, *shlex.split(line)], cwd=folder, check=True)
    llm = LLM(str(target.folder.path), **TINY, speculate=f"medusa:{folder}", **FIXED)
    assert drafter_of(llm)._companion.num_heads == 4
