"""Pitfalls of speculative decoding that concern drafts: distribution, vocabulary, price, counts, and who sees them.

The numbers are those of the table in docs/drafting-pitfalls.md.
"""

import json
import random
import shutil
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import oracle_heads
import pytest
from tiny_models import build

from drafting import TINY
from planting import Pitfalls, World
from ridgeline import LLM, SamplingParams
from ridgeline.backends.step import StepOutput
from ridgeline.cache.layout import CacheLayout, GroupLayout
from ridgeline.cache.manager import CacheManager
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.core.speculation import SpeculationConfig
from ridgeline.core.step import DraftStats, SampledToken, SampleRow, StepPlan, StepResult
from ridgeline.decoding.draft_control import DraftControl
from ridgeline.decoding.drafters import Companion
from ridgeline.decoding.drafters.draft import DraftModel
from ridgeline.decoding.proposers import Draft, build_proposer
from ridgeline.decoding.proposers.ngram import Ngram
from ridgeline.decoding.proposers.suffix import Suffix
from ridgeline.decoding.rejection import ACCEPTANCE
from ridgeline.decoding.sampling import Sampler
from ridgeline.decoding.strategies import speculative
from ridgeline.decoding.strategies.speculative import Speculative
from ridgeline.decoding.strategy import Room
from ridgeline.engine import companion
from ridgeline.explain.rounds import break_even
from ridgeline.program.ops import experts
from ridgeline.weights import medusa
from ridgeline.weights.folder import BUNDLED_MODELS

pytestmark = [
    pytest.mark.skipif(find_spec("ridgeline._native") is None, reason="needs the native backend"),
    pytest.mark.usefixtures("one_round"),  # each of which is looked at
]
PITFALLS = Pitfalls()
V = 4
rng = np.random.default_rng(5)
TARGET = rng.normal(0, 0.7, (V, V)).astype(np.float32)  # logits of the token after each token
DRAFTER = (TARGET + rng.normal(0, 0.8, (V, V))).astype(np.float32)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=100)


def view_of(seq_id, token_ids, params=SAMPLED, seed=0, num_prompt=1, **more):
    asked = {
        "prompt_ids": list(token_ids[:num_prompt]),
        "params": params,
        "max_tokens": params.max_tokens,
        "stop_ids": (),
        "adapter": 0,
        "prediction_ids": (),
        "salt": "",
    } | more
    known = list(token_ids)
    return SimpleNamespace(
        seq_id=seq_id, token_ids=known, num_computed=len(known) - 1, seed=seed, grammar=None,
        request=SimpleNamespace(**asked),
    )  # fmt: skip


def sampled_from(table, sampler, plan):
    """What a model whose next token depends on the last one alone samples in a step."""
    last = [token for span in plan.spans if span.num_logit_rows for token in span.token_ids[-span.num_logit_rows :]]
    samples, _ = sampler.sample(StepOutput(table[last].copy()), plan.samples)
    return StepResult(plan.step, samples)


class Tables:
    """Target and draft model as tables, behind the real strategy, drafter and sampler."""

    def __init__(self, num_drafted=2):
        layout = CacheLayout(4, (GroupLayout("full", (0,), None, 8, 200),), 64)
        drafting = Sampler()
        self.companion = Companion(
            CacheManager(layout), V, 64, 512, {}, lambda plan: sampled_from(DRAFTER, drafting, plan)
        )
        self.sampler, self.num_drafted = Sampler(), num_drafted
        drafter = "draft", DraftModel(self.companion)
        self.strategy = Speculative({}, num_drafted, None, lambda: 0.0, drafter, rules=("reject",))

    def outputs(self, params, seeds, num_tokens=3):
        """The first `num_tokens` of outputs that are sampled in one batch."""
        views = [view_of(seed, [0, 0], params, seed) for seed in seeds]
        running = list(views)
        while running:
            self.strategy.begin(running, Room(200, 200))
            spans = [self.strategy.next_span(view, 64, score_all=False) for view in running]
            rows, first = [], 0
            for view, span in zip(running, spans):
                rows += self.strategy.rows(view, span, first)
                first += span.num_logit_rows
            result = sampled_from(TARGET, self.sampler, StepPlan(1, tuple(spans), (), (), tuple(rows)))
            for view, span in zip(running, spans):
                own = [token for token in result.samples if token.seq_id == view.seq_id]
                accepted = self.strategy.accept(view, span, own)
                view.token_ids += [token.token_id for token in accepted.tokens]
                view.num_computed = len(view.token_ids) - 1
            running = [view for view in running if len(view.token_ids) < 2 + num_tokens]
        for view in views:
            self.strategy.forget(view)
        return [view.token_ids[2 : 2 + num_tokens] for view in views]


def joint(params=SAMPLED):
    """The target's distribution of three tokens."""
    rows = [SampleRow(0, last, params, 0, 1, [0], (), (), tells_weights=True) for last in range(V)]
    sampled, _ = Sampler().sample(StepOutput(TARGET.copy()), rows)
    after = np.zeros((V, V))
    for last, token in enumerate(sampled):
        after[last] = token.weights / token.weights.astype(np.float64).sum()
    return np.einsum("a,ab,bc->abc", after[0], after, after)


def assert_fits(outputs):
    """Chi-squared over the 64 outcomes; what cannot happen must not."""
    counts, expected = np.zeros((V, V, V)), joint() * len(outputs)
    np.add.at(counts, tuple(np.array(outputs).T), 1)
    assert not counts[expected == 0].any()
    inside = expected > 0
    statistic, freedom = ((counts - expected)[inside] ** 2 / expected[inside]).sum(), inside.sum() - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty, 1e-6
    assert statistic < bound, f"{statistic:.0f} of {bound:.0f}"


# ---- 1, 2, 3: rejection sampling


@PITFALLS.check(1)
def the_outcome_is_the_targets(world):
    """Top-p on both sides, several sequences in a step: drafted by the draft model, told, verified."""
    tables = Tables()
    outputs = [one for first in range(0, 2400, 8) for one in tables.outputs(SAMPLED, range(first, first + 8))]
    assert_fits(outputs)
    counts = tables.strategy.drafts()["draft"]
    assert 0.3 * counts.num_draft_tokens < counts.num_accepted_tokens < 0.9 * counts.num_draft_tokens


@PITFALLS.bug(1, "q is told without the cut of top-p")
def told_without_top_p(monkeypatch):
    below = speculative.Draft

    def raw(token_ids, evidence, method="", weights=(), parents=()):
        whole = [np.maximum(weights_V, weights_V.max() // 4) for weights_V in weights]
        return below(token_ids, evidence, method, whole, parents)

    monkeypatch.setattr(speculative, "Draft", raw)


@PITFALLS.bug(1, "drafts are accepted by the word that sampled them")
def words_used_twice(monkeypatch):
    row = DraftModel._row
    monkeypatch.setattr(
        DraftModel,
        "_row",
        lambda self, view, at, by_rejection: row(self, view, at, by_rejection)._replace(seed=view.seed ^ ACCEPTANCE),
    )


@PITFALLS.check(2)
def greedy_requests_are_greedy(world):
    greedy = SamplingParams(temperature=0, max_tokens=100)
    expected = [0]
    while len(expected) < 13:
        expected.append(int(TARGET[expected[-1]].argmax()))
    assert Tables().outputs(greedy, range(4), 12) == [expected[1:]] * 4


@PITFALLS.bug(2, "greedy requests are verified by rejection")
def rejected_though_greedy(monkeypatch):
    monkeypatch.setattr(Speculative, "_by_rule", lambda self, rule, view: rule == "reject")


@PITFALLS.check(3)
def sequences_of_a_step_do_not_share_what_they_are_verified_by(world):
    """Each has its own q, whatever the others' drafts; in one batch as alone."""
    seeds = range(40)
    alone = world.once("alone", lambda: [Tables().outputs(SAMPLED, [seed])[0] for seed in seeds])
    assert Tables().outputs(SAMPLED, seeds) == alone


@PITFALLS.bug(3, "q of the sequence before")
def anothers_weights(monkeypatch):
    begin = Speculative.begin

    def shifted(self, running, room):
        begin(self, running, room)
        keys = list(self._drafts)
        told = [self._drafts[key].weights for key in keys]
        for key, weights in zip(keys, told[1:] + told[:1], strict=True):
            self._drafts[key] = self._drafts[key]._replace(weights=weights)

    monkeypatch.setattr(Speculative, "begin", shifted)


@PITFALLS.bug(3, "q of the row before")
def row_before(monkeypatch):
    rows = Speculative.rows

    def shifted(self, view, span, first_row):
        found = list(rows(self, view, span, first_row))
        trials = [row.trial for row in found]
        for i in range(1, len(found)):
            if trials[i] is not None:
                found[i] = found[i]._replace(trial=trials[i]._replace(weights_V=trials[i - 1].weights_V))
        return found

    monkeypatch.setattr(Speculative, "rows", shifted)


# ---- 16, 25: vocabularies, and how many heads there are


@PITFALLS.check(16)
def equal_ids_are_equal_tokens(world):
    """A table that is off by one is refused by name; ids of a draft vocabulary become the model's."""
    folder = world.folder / "off-by-one"
    shutil.copytree(BUNDLED_MODELS / "python-1m", folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    by_id = {token_id: token for token, token_id in vocab.items()}
    last = max(by_id)
    vocab[by_id[last]], vocab[by_id[last - 1]] = last - 1, last
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    refusal = ""
    try:
        LLM("python-9m", speculate=f"draft:{folder}", max_model_len=64)
    except ConfigError as error:
        refusal = str(error)
    assert f"token {last - 1} is " in refusal and "both need the same vocabulary" in refusal


@PITFALLS.bug(16, "tables are not compared")
def not_compared(monkeypatch):
    monkeypatch.setattr(companion, "_first_difference", lambda one, other: None)


@PITFALLS.check(25)
def heads_are_counted_in_the_tensors(world):
    """Whatever the config says: 2 in those of the first publication's layout."""
    model = world.once("llama", lambda: build("llama", 3, world.folder / "llama"))
    for count in (1, 3, 5):
        folder = oracle_heads.Medusa(model, "paper", count).write(world.folder / f"medusa-{count}")
        try:
            llm = LLM(str(model.folder.path), **TINY, speculate=f"medusa:{folder}")
        except ModelLoadError as error:
            raise AssertionError(f"{count} heads are refused") from error
        assert llm.engine.loop.scheduler.strategy._model.drafter._companion.num_heads == count


@PITFALLS.bug(25, "heads are counted in the config")
def counted_in_the_config(monkeypatch):
    heads = medusa.MedusaHeads
    monkeypatch.setattr(medusa, "MedusaHeads", lambda num_heads, **given: heads(num_heads=2, **given))


# ---- 19, 20, 21: what drafts cost


class Watched(list):
    """Tokens that count how many of them are read."""

    num_read = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self):
        self.num_read += len(self)
        return super().__iter__()


@PITFALLS.check(19)
def a_lookup_reads_what_is_new(world):
    """However long the text: a step's lookup reads no more than some places that it compares."""
    for name in ("ngram", "suffix", "prediction"):
        proposer = build_proposer(name, SpeculationConfig(speculate=name))
        view = view_of(0, [], num_prompt=1, prediction_ids=[1, 2, 3])
        view.token_ids = Watched(random.Random(1).choices(range(50), k=20_000))
        proposer.propose(view, 8)
        assert view.token_ids.num_read < 10 * 20_000
        for _ in range(20):
            view.token_ids.append(7)
            before = view.token_ids.num_read
            proposer.propose(view, 8)
            assert view.token_ids.num_read - before < 500


@PITFALLS.bug(19, "the index is made anew")
def made_anew(monkeypatch):
    propose = Ngram.propose

    def forgetful(self, view, max_tokens):
        self._indexes.clear()
        return propose(self, view, max_tokens)

    monkeypatch.setattr(Ngram, "propose", forgetful)


@PITFALLS.bug(19, "the index reads all tokens again")
def reads_all(monkeypatch):
    propose = Suffix.propose

    def whole(self, view, max_tokens):
        _ = view.token_ids[:]
        return propose(self, view, max_tokens)

    monkeypatch.setattr(Suffix, "propose", whole)


def rate(step_s, acceptance, num_sequences, num_steps=1500, names="ngram"):
    """Tokens a second on a fake clock, where a step of m tokens takes `step_s(m)` and drafts are right so often."""
    now, chance = [0.0], random.Random(3)
    config = EngineConfig.of("any", speculate=names)
    strategy = speculative.build(None, config, lambda: now[0])

    class Says:
        def propose(self, view, max_tokens):
            known = len(view.token_ids)
            right = [known + i if chance.random() < acceptance else 0 for i in range(max_tokens)]
            return Draft(right, 0)

        def forget(self, view):
            pass

    strategy._proposers = {"ngram": Says()}
    params = SamplingParams(max_tokens=10**6)
    views = [view_of(i, [0, 1, 2], params, num_prompt=2) for i in range(num_sequences)]
    gained = 0
    for _ in range(num_steps):
        strategy.begin(views, Room(512, 512))
        spans = [strategy.next_span(view, 64, score_all=False) for view in views]
        rows = tuple(row for view, span in zip(views, spans) for row in strategy.rows(view, span, 0))
        plan = StepPlan(1, tuple(spans), (), (), rows)
        seconds = step_s(plan.num_tokens)
        now[0] += seconds
        for view, span in zip(views, spans):
            known = len(view.token_ids)
            said = [SampledToken(view.seq_id, known + i) for i in range(1 + span.num_optional)]
            tokens = [token.token_id for token in strategy.accept(view, span, said).tokens]
            gained += len(tokens)
            view.token_ids += tokens
            view.num_computed = len(view.token_ids) - 1
        strategy.observe(plan, StepResult(1, ()), seconds)
    return gained / now[0]


@PITFALLS.check(20)
def experts_make_drafts_dear(world):
    """More rows read more experts: the price says so, and drafts that do not pay for it are left out."""
    config = {
        "model_type": "qwen3_moe", "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 3072,
        "moe_intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (world.folder / "experts").mkdir(exist_ok=True)
    (world.folder / "experts/config.json").write_text(json.dumps(config))
    asked = EngineConfig.of(str(world.folder / "experts"), speculate="ngram")
    found = {(r.weights, r.batch, r.drafts): r for r in break_even(asked, "h100-sxm", 256)[1]}
    assert found["as stored", 1, 4].acceptance > 0.3

    def step_s(num_tokens):
        return 0.001 * (1 + 0.1 * experts.distinct_experts(64, 8, num_tokens))

    for acceptance, least in ((0.2, 0.97), (0.5, 1.0), (0.7, 1.1)):
        assert rate(step_s, acceptance, 1) > least / step_s(1)


@PITFALLS.bug(20, "every step reads the experts of one token")
def as_one_token(monkeypatch):
    monkeypatch.setattr(experts, "distinct_experts", lambda num_experts, top_k, num_tokens: top_k)


@PITFALLS.bug(20, "every draft has its full length")
def full_length(monkeypatch):
    monkeypatch.setattr(
        speculative,
        "lengths_of",
        lambda guesses, *_: {key: guess.num_tokens for key, guess in guesses.items()},
    )


@PITFALLS.check(21)
def drafts_never_cost_throughput(world):
    """On a machine that is busy, waits for memory, or changes between the two, at any acceptance and batch."""
    machines = (lambda m: 0.010 + 0.0001 * m, lambda m: 0.010 * max(1, m / 8), lambda m: 0.004 * m)
    for step_s in machines:
        for batch, acceptance in ((1, 0.1), (1, 0.5), (1, 0.9), (8, 0.1), (8, 0.9), (32, 0.5)):
            assert rate(step_s, acceptance, batch, 600) > 0.96 * batch / step_s(batch)
    assert rate(machines[0], 0.9, 1, 600) > 2.5 / machines[0](1)


@PITFALLS.bug(21, "drafts are asked for at every step, and have their full length")
def always_full(monkeypatch):
    full_length(monkeypatch)
    monkeypatch.setattr(DraftControl, "rests", lambda self, num_decodes: not self.times.knows(num_decodes, 0))


# ---- 23, 26: what is counted, and who sees it


@PITFALLS.check(23)
def a_round_is_counted_by_what_was_verified(world):
    """Three drafts of two sequences by hand: one token right, all of two, none."""
    strategy = Speculative({"says": None}, 4, None, lambda: 0.0)
    for seq_id, (drafted, sampled) in enumerate((([5, 6, 7, 8], 5), ([3, 4], None), ([9, 9, 9], 1))):
        view = view_of(seq_id, [0, 1])
        span_of = {"token_ids": [1, *drafted], "num_logit_rows": 1 + len(drafted), "num_optional": len(drafted)}
        span = strategy.next_span(view, 1, score_all=False)._replace(**span_of)
        strategy._drafts[seq_id] = Draft(drafted, 0, "says")
        right = [*drafted, 0] if sampled is None else [sampled, 1, 7, 8, 9][: 1 + len(drafted)]
        strategy.accept(view, span, [SampledToken(seq_id, token) for token in right])
    assert strategy.drafts() == {"says": DraftStats(3, 9, 3, (2, 1))}


@PITFALLS.bug(23, "tokens behind a rejected one are accepted")
def counted_behind(monkeypatch):
    with_draft = DraftStats.with_draft
    monkeypatch.setattr(
        DraftStats, "with_draft", lambda self, drafted, accepted: with_draft(self, drafted, min(accepted + 2, drafted))
    )


@PITFALLS.bug(23, "the token behind the draft is counted as drafted")
def bonus_counted(monkeypatch):
    with_draft = DraftStats.with_draft
    monkeypatch.setattr(
        DraftStats, "with_draft", lambda self, drafted, accepted: with_draft(self, drafted + 1, accepted)
    )


@PITFALLS.check(26)
def tenants_do_not_see_each_others_outputs(world):
    """What a second tenant's requests draft is the same, whatever the first one was answered."""

    def second(first_output):
        proposer = build_proposer("suffix", SpeculationConfig(speculate="suffix"))
        one = view_of(1, [1, 2, *first_output], num_prompt=2, salt="first")
        proposer.propose(one, 4)
        proposer.forget(one)
        asked = [view_of(2, [1, 5, 6, 7, 8][:known], salt="second") for known in range(2, 6)]
        return [proposer.propose(view, 4) for view in asked]

    assert second([5, 6, 7, 8, 9]) == second([20, 21, 22, 23])


@PITFALLS.bug(26, "there is one pool for all")
def one_pool(monkeypatch):
    propose, forget = Suffix.propose, Suffix.forget

    def shared(view):
        request = SimpleNamespace(**vars(view.request) | {"salt": ""})
        return SimpleNamespace(**vars(view) | {"request": request})

    monkeypatch.setattr(Suffix, "propose", lambda self, view, most: propose(self, shared(view), most))
    monkeypatch.setattr(Suffix, "forget", lambda self, view: forget(self, shared(view)))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("pitfalls"), None)


test_pitfall, test_a_planted_bug_is_caught = PITFALLS.tests()
