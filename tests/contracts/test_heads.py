"""Published heads that draft: they load, guess what a plain torch implementation guesses, and change no output."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import oracle_heads
import pytest
import torch
from test_drafts_in_the_engine import assert_same_outputs
from tiny_models import build

from cache_invariants import check_cache
from drafting import TINY, drafter_of, prompts_of
from ridgeline import LLM, SamplingParams
from ridgeline.backends.native.executable import NativeExecutable
from ridgeline.backends.step import ChainEnds
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.decoding.draft_control import DraftControl
from ridgeline.decoding.drafters import eagle
from ridgeline.engine import companion

pytestmark = [
    pytest.mark.skipif(
        find_spec("ridgeline._native") is None, reason="only native code computes a row alike in every batch"
    ),
    pytest.mark.usefixtures("one_round"),  # each of which is looked at
]
FIXED = {"adaptive_speculation": False, "num_speculative_tokens": 3, "draft_quantize": "none"}
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
HEADS = {
    "eagle-1": lambda model: oracle_heads.Eagle(model, 1, ()),
    "eagle-3": lambda model: oracle_heads.Eagle(model, 3, (0, 1, len(model.spec.layers) - 1), "midlayer."),
    "eagle-3, normed": lambda model: oracle_heads.Eagle(
        model, 3, (0, 1, len(model.spec.layers) - 1), flags=("norm_before_residual", "norm_before_fc", "norm_output")
    ),
    "eagle-3, each normed": lambda model: oracle_heads.Eagle(
        model, 3, (0, 1, len(model.spec.layers) - 1), flags=("fc_norm",)
    ),
}


def recorded(llm):
    """What is drafted behind which tokens, as it goes on."""
    drafter, found = drafter_of(llm), []
    draft = drafter.draft

    def recording(asked, max_catch_up):
        drafts = draft(asked, max_catch_up)
        found.extend(
            (list(r.view.token_ids), list(drafts[r.view.seq_id].token_ids)) for r in asked if r.view.seq_id in drafts
        )
        return drafts

    drafter.draft = recording
    return found


def wrong_drafts(name, target, folder):
    """How many drafts of how many differ from those of the plain implementation, round after round."""
    head = HEADS[name](target)
    llm = LLM(str(target.folder.path), **TINY, speculate=f"eagle:{head.write(folder)}", **FIXED)
    found = recorded(llm)
    llm.generate(prompts_of(target), GREEDY, use_tqdm=False)
    assert max(len(drafted) for _, drafted in found) == 3
    some = found[::3]
    return sum(drafted != head.greedy(token_ids, len(drafted)) for token_ids, drafted in some), len(some)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_drafts_what_a_plain_implementation_drafts(name, target, tmp_path):
    """Round after round: true hidden states have replaced what was drafted and rejected."""
    wrong, drafted = wrong_drafts(name, target, tmp_path)
    assert wrong == 0
    assert drafted > 20


@pytest.mark.parametrize("name", HEADS)
def test_texts_that_are_equal_but_for_their_first_token_share_nothing_of_a_head(name, target, tmp_path):
    """Its pairs have no first token, but their hidden states depend on it."""
    head = HEADS[name](target)
    llm = LLM(str(target.folder.path), **TINY, speculate=f"eagle:{head.write(tmp_path)}", **FIXED)
    prompt = prompts_of(target, 1)[0] * 2
    found = recorded(llm)
    for first in (prompt[0], prompt[0] + 1, prompt[0] + 2):
        llm.generate([[first, *prompt[1:]]], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    wrong = [drafted for token_ids, drafted in found if drafted != head.greedy(token_ids, len(drafted))]
    assert len(found) >= 9
    assert not wrong


@pytest.mark.parametrize("name", HEADS)
def test_a_head_has_of_a_prefix_what_it_computed_for_another_text(name, target, tmp_path):
    """Where the model finds it in its cache, and so computes no hidden state of it again."""
    head = HEADS[name](target)
    llm = LLM(str(target.folder.path), **TINY, speculate=f"eagle:{head.write(tmp_path)}", **FIXED)
    prompt = prompts_of(target, 1)[0] * 2
    llm.generate([prompt], GREEDY, use_tqdm=False)
    found, cache = recorded(llm), llm.engine.loop.scheduler.cache
    for number, behind in enumerate(([], [prompt[0]], [prompt[1], prompt[0]])):
        before = cache.stats().prefix_hit_tokens
        llm.generate([[*prompt, *behind]], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
        assert cache.stats().prefix_hit_tokens > before + number
    assert len(found) >= 9
    assert not [drafted for token_ids, drafted in found if drafted != head.greedy(token_ids, len(drafted))]
    check_cache(drafts := drafter_of(llm)._cache)
    assert sum(group.cached for group in drafts.stats().groups) > 0
    llm.update_weights(str(target.folder.path))
    assert sum(group.cached for group in drafts.stats().groups) == 0


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_rests_lets_steps_overlap_and_misses_no_hidden_state(name, target, plain, tmp_path, monkeypatch):
    """Some steps at rest, planned while others are computed; then some that ask, and so on."""
    num_asked = iter(range(10**6))
    monkeypatch.setattr(DraftControl, "rests", lambda self, num_decodes: next(num_asked) // 12 % 2 == 0)
    monkeypatch.setattr(DraftControl, "choose", lambda self, n, survivals, *_, **__: list(map(len, survivals)))
    head = HEADS[name](target)
    options = TINY | {"num_threads": 2, "num_speculative_tokens": 3, "draft_quantize": "none"}
    llm = LLM(str(target.folder.path), **options, speculate=f"eagle:{head.write(tmp_path)}")
    executor, overlapped, found = llm.engine.loop._executor, [], recorded(llm)
    submit = executor.submit
    executor.submit = lambda plan: (overlapped.append(executor._started is not None), submit(plan))
    outputs = llm.generate(prompts_of(target), GREEDY, use_tqdm=False)
    assert sum(overlapped) > 10
    assert len(found) > 10
    assert not [drafted for token_ids, drafted in found if drafted != head.greedy(token_ids, len(drafted))]
    assert [o.outputs[0].token_ids for o in outputs] == [
        o.outputs[0].token_ids for o in plain.generate(prompts_of(target), GREEDY, use_tqdm=False)
    ]


def without_feedback(self, *args, chain=NativeExecutable.chain, **more):
    """What a step computed is not what the next one reads."""
    features = self._features
    width = self._tape.view(self._taps[-1].buffer, 1).shape[1]
    own, self._taps = self._taps, [replace(features, buffer=self._tape.buffer("tokens", width))]
    try:
        return chain(self, *args, **more)
    finally:
        self._taps = own


PLANTED = {
    "ids of the draft vocabulary are taken for the model's": (
        companion,
        "ChainEnds",
        lambda size, ids: ChainEnds(size),
    ),
    "hidden states are those of the token behind": (
        eagle._Hidden,
        "rows",
        lambda self, start, end, rows=eagle._Hidden.rows: np.roll(rows(self, start, end), 1, axis=0),
    ),
    "a draft does not go on with the head's hidden state": (NativeExecutable, "chain", without_feedback),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_seen(bug, target, tmp_path, monkeypatch):
    monkeypatch.setattr(*PLANTED[bug])
    wrong, _ = wrong_drafts("eagle-3", target, tmp_path)
    assert wrong > 0


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5, "max_num_seqs": 5}], ids=["", "chunked"])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_changes_no_output(name, options, target, plain, tmp_path):
    """Alone, batched, in chunks, from cached prefixes, preempted; greedy and seeded, with several outputs."""
    folder = HEADS[name](target).write(tmp_path)
    llm = LLM(str(target.folder.path), **TINY | options, speculate=f"eagle:{folder}", **FIXED)
    assert_same_outputs(llm, plain, prompts_of(target))
    stats = llm.engine.loop.scheduler.strategy.drafts()["eagle"]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    drafter = drafter_of(llm)
    assert not drafter._hidden
    check_cache(drafter._companion.cache, {})
    assert all(group.used == 0 for group in drafter._companion.cache.stats().groups)


def test_a_head_on_the_reference_backend_and_with_rejection(target, tmp_path):
    """Both backends draft the same; sampled drafts are of the distribution that is told of them."""
    pytest.importorskip("torch")
    head = HEADS["eagle-3"](target)
    folder = head.write(tmp_path)
    sizes = {key: value for key, value in TINY.items() if key != "deterministic"}
    llm = LLM(str(target.folder.path), **sizes, backend="reference", speculate=f"eagle:{folder}", **FIXED)
    found = recorded(llm)
    llm.generate(prompts_of(target, 1), GREEDY, use_tqdm=False)
    for token_ids, drafted in found[::3]:
        assert drafted == head.greedy(token_ids, len(drafted))
    llm = LLM(
        str(target.folder.path),
        **sizes,
        speculate=f"eagle:{folder}",
        **FIXED,
        draft_sample_method="probabilistic",
    )
    found, told = recorded(llm), []
    draft = drafter_of(llm).draft

    def telling(asked, max_catch_up):
        drafts = draft(asked, max_catch_up)
        told.extend(pair for one in drafts.values() for pair in zip(one.token_ids, one.weights, strict=True))
        return drafts

    drafter_of(llm).draft = telling
    llm.generate(prompts_of(target), SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True), use_tqdm=False)
    assert len(told) > 60
    for token_id, weights_V in told:
        assert np.flatnonzero(weights_V).tolist() == sorted(head.ids.tolist())
        assert weights_V[token_id] > 0
    drafted = {token for _, tokens in found for token in tokens}
    assert drafted <= set(head.ids.tolist())
    assert len(drafted) > 10
    stats = llm.engine.loop.scheduler.strategy.drafts()["eagle"]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda head: {"config": {"no_such_key": 3}}, ConfigError, "no_such_key=3"),
        (lambda head: {"config": {"parallel_drafting": True}}, ConfigError, "parallel_drafting=True is not supported"),
        (lambda head: {"config": {"fc_norm": True}}, ModelLoadError, "fc_norm.0.weight is missing"),
        (
            lambda head: {"tensors": {"fc_norm.0.weight": torch.ones(32)}},
            ModelLoadError,
            "fc_norm.0.weight is not read",
        ),
        (lambda head: {"config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 99]}}, ConfigError, "99"),
        (lambda head: {"tensors": {"d2t": None}}, ModelLoadError, "lacks d2t"),
        (lambda head: {"tensors": {"lm_head.weight": None}}, ModelLoadError, "lacks lm_head.weight, for the 65 tokens"),
        (lambda head: {"tensors": {"d2t": head.t["d2t"] + 2}}, ModelLoadError, "token ids are not those of"),
        (lambda head: {"tensors": {"midlayer.other.weight": torch.ones(2)}}, ModelLoadError, "other.weight is not"),
        (lambda head: {"tensors": {"norm.weight": None}}, ModelLoadError, "final_norm.weight is missing"),
        (lambda head: {"config": {"vocab_size": 7}}, ConfigError, "hidden size .* and 7 tokens"),
        (
            lambda head: {"tensors": {"fc.weight": torch.ones(16, 48)}},
            ConfigError,
            "it is for a model of hidden size 16",
        ),
    ],
    ids=[
        "key",
        "unsupported",
        "no norm",
        "norm",
        "layer",
        "no d2t",
        "no head",
        "d2t",
        "tensor",
        "missing",
        "vocabulary",
        "hidden size",
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_one_line(change, error, message, target, tmp_path):
    head = HEADS["eagle-3"](target)
    with pytest.raises(error, match=message) as caught:
        LLM(str(target.folder.path), **TINY, speculate=f"eagle:{head.write(tmp_path, **change(head))}", **FIXED)
    assert "\n" not in str(caught.value)


def test_auto_drafts_with_the_head_that_came_with_a_model(tmp_path):
    """Unless a model was named, or none came."""
    model = build("llama", 3, tmp_path / "model")
    path = str(model.folder.path)
    assert LLM(path, **TINY, speculate="auto").engine.loop.scheduler.strategy._model is None
    HEADS["eagle-3"](model).write(model.folder.path / "eagle3")
    for speculate, drafter in (("auto", "eagle"), ("suffix", None), ("auto,early-exit:1", "early-exit")):
        strategy = LLM(path, **TINY, speculate=speculate).engine.loop.scheduler.strategy
        assert (strategy._model and strategy._model.method) == drafter
