"""Pitfalls of speculative decoding that concern memory: keys and values, states, blocks, prefixes, drafters' caches.

On equals off, bit for bit. The numbers are those of the table in docs/drafting-pitfalls.md.
"""

import itertools
import json
import shutil
from importlib.util import find_spec

import oracle_heads
import pytest
from tiny_models import build

import ridgeline.cache.groups.recurrent as recurrent_groups
from cache_invariants import check_cache
from drafting import TINY, Oracle, TreeOracle, drafter_of, known_outputs, prompts_of, verified
from planting import Pitfalls, World
from preemption import generate_with_preemption
from ridgeline import LLM, SamplingParams
from ridgeline.cache.groups.recurrent import RecurrentGroup
from ridgeline.cache.groups.sliding import SlidingGroup
from ridgeline.cache.manager import CacheManager
from ridgeline.decoding.draft_control import DraftControl
from ridgeline.decoding.drafters import Drafted
from ridgeline.decoding.drafters.draft import DraftModel
from ridgeline.decoding.drafters.eagle import Eagle
from ridgeline.decoding.model_drafts import ModelDrafts
from ridgeline.decoding.strategies import speculative
from ridgeline.decoding.strategies.speculative import Speculative
from ridgeline.engine import batch
from ridgeline.engine.batch import BatchBuilder
from ridgeline.engine.committing import StepCommit
from ridgeline.engine.planning import StepDraft

pytestmark = [
    pytest.mark.skipif(
        find_spec("ridgeline._native") is None, reason="only native code computes a row alike in every batch"
    ),
    pytest.mark.usefixtures("one_round"),  # each of which is looked at
]
PITFALLS = Pitfalls()
HYBRIDS = [("qwen3_next", 1), ("jamba", 3), ("nemotron_h", 1)]
RECURRENT = [*HYBRIDS, ("mamba2", 1), ("falcon_mamba", 1), ("bamba", 1), ("minimax", 1), ("mamba", 1)]
FIXED = {"adaptive_speculation": False, "num_speculative_tokens": 3, "draft_quantize": "none"}
LOGGED = {"speculate": "prediction", "num_speculative_tokens": 6}  # room for drafts behind recurrent states
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def completions(outputs):
    return [(list(c.token_ids), c.finish_reason) for o in outputs for c in o.outputs]


def tiny(world, family="llama", seed=3):
    return world.once((family, seed), lambda: build(family, seed, world.folder / f"{family}-{seed}"))


def plainly(model):
    return known_outputs(LLM(str(model.folder.path), **TINY), prompts_of(model), GREEDY)


def on_is_off(world, name, model, params, options, prompts=None, generate=None, oracle=Oracle):
    """Compare an engine that verifies an oracle's drafts with one that makes none; returns the former."""
    folder, prompts = str(model.folder.path), prompts or prompts_of(model)
    off, known = world.once(name, lambda: known_outputs(LLM(folder, **TINY | options), prompts, params))
    llm = LLM(folder, **TINY | options | LOGGED)
    strategy = verified(llm, known, oracle=oracle)
    scheduler, submit = llm.engine.loop.scheduler, llm.engine.executor.submit

    def watched(plan):
        assert max(span.end for span in plan.spans) <= llm.engine.info.max_model_len
        submit(plan)

    llm.engine.executor.submit = watched
    assert completions(llm.generate(prompts, params, use_tqdm=False)) == completions(off)
    if generate is not None:
        assert completions(generate(llm, prompts, params)) == completions(off)
    counts = strategy.drafts()["oracle"]
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    check_cache(scheduler.cache, {})
    assert all(group.used == 0 for group in scheduler.stats().cache.groups)
    return llm


# ---- 9, 10: what a head or a draft model keeps


@PITFALLS.check(9)
def a_head_costs_no_prefix_hit(world):
    """Prompts that begin alike and go on otherwise find as much with a head as without one."""
    for family, seed in (("llama", 3), ("jamba", 3), ("gemma3_text", 1)):
        model = tiny(world, family, seed)
        folder = str(oracle_heads.Eagle(model, 1, ()).write(world.folder / f"head-{family}"))
        prompt = prompts_of(model, 1)[0] + prompts_of(model, 2)[1]
        turns = [prompt, [*prompt, 5, 6, 7], [*prompt, 9, 8, 7, 6, 5]]
        short = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

        def hits(turns=turns, short=short, model=model, **options):
            llm = LLM(str(model.folder.path), **TINY, **options)
            return [llm.generate([turn], short, use_tqdm=False)[0].num_cached_tokens for turn in turns]

        off = world.once(f"hits {family}", hits)
        assert off[1] >= 16
        assert hits(speculate=f"eagle:{folder}", **FIXED) == off


@PITFALLS.bug(9, "the last block of a hit is dropped")
def last_block(monkeypatch):
    find = CacheManager._find

    def shorter(self, tokens, salt):
        num_blocks = len(find(self, tokens, salt).path)
        return find(self, tokens[: max(num_blocks - 1, 0) * self.layout.block_size + 1], salt)

    monkeypatch.setattr(CacheManager, "_find", shorter)


def head_outputs(world, known, right):
    """By text, what the head computes for its newest token from true hidden states: bits that show its whole cache."""
    model = tiny(world)
    folder = str(
        oracle_heads.Eagle(model, 3, (0, 1, len(model.spec.layers) - 1), "midlayer.").write(world.folder / "e3")
    )
    llm = LLM(str(model.folder.path), **TINY, speculate=f"eagle:{folder}", **FIXED)
    drafter, found = drafter_of(llm), {}
    compute, draft, run = drafter._companion.compute, drafter.draft, drafter._run
    first = []

    def forced(plan):
        """Let the head draft what will come, or never do."""
        result = compute(plan)
        samples = []
        for token, row in zip(result.samples, plan.samples, strict=True):
            comes = known.outputs[tuple(row.prompt_ids), 0, 0][row.num_output]
            wrong = (comes + 1) % model.spec.vocab_size
            samples.append(token._replace(token_id=comes if right else wrong))
        return result._replace(samples=tuple(samples))

    def watched_run(spans, copies, chains, rows, tables, followed, features):
        number = run(spans, copies, chains, rows, tables, followed, features)
        for chain in chains if first else ():
            found[tuple(chain.view.token_ids)] = chain.features_1W.tobytes()
        first.clear()
        return number

    def watched_draft(asked, max_catch_up):
        first.append(True)
        return draft(asked, max_catch_up)

    drafter._companion.compute, drafter.draft, drafter._run = forced, watched_draft, watched_run
    drafter._companion.chain = None
    outputs = llm.generate(prompts_of(model), GREEDY, use_tqdm=False)
    return found, outputs, llm


@PITFALLS.check(10)
def what_was_drafted_is_computed_again(world):
    """Where drafts were accepted, a head's cache is bit for bit what it is where none ever was; and a draft model's
    holds nothing that was rejected: the model itself is right in every round behind a wrong one."""
    model = tiny(world)
    off, known = world.once(
        "plain", lambda: known_outputs(LLM(str(model.folder.path), **TINY), prompts_of(model), GREEDY)
    )
    fresh = world.once("fresh", lambda: head_outputs(world, known, right=False)[0])
    found, outputs, llm = head_outputs(world, known, right=True)
    assert completions(outputs) == completions(off)
    stats = llm.engine.loop.scheduler.strategy.drafts()["eagle"]
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 60
    assert len(found) > 25
    assert all(fresh[text] == bits for text, bits in found.items() if text in fresh)
    assert sum(text in fresh for text in found) > 20
    itself_after_wrong_rounds(model, off, known)


class NowAndThen(Oracle):
    """Drafts what comes at every third token, so that a draft model is not asked."""

    def propose(self, view, max_tokens):
        return super().propose(view, max_tokens) if len(view.token_ids) % 3 == 0 else None


def itself_after_wrong_rounds(model, off, known):
    """Every second draft of a model for itself is spoilt from its first token on: all others are what it says, also
    where somebody else has drafted in between."""
    llm = LLM(str(model.folder.path), **TINY, speculate=f"draft:{model.folder.path}", **FIXED)
    strategy, drafter, rounds, whole = llm.engine.loop.scheduler.strategy, drafter_of(llm), [], []
    strategy._proposers = {"prediction": NowAndThen(known, model.spec.vocab_size, right=1.0)}
    draft, compute = drafter.draft, drafter._companion.compute
    said = {tuple(prompt): list(output.outputs[0].token_ids) for prompt, output in zip(prompts_of(model), off)}

    def spoilt(plan):
        result = compute(plan)
        if len(rounds) % 2:
            return result
        wrong = [t._replace(token_id=(t.token_id + 1) % model.spec.vocab_size) for t in result.samples]
        return result._replace(samples=tuple(wrong))

    def watched(asked, max_catch_up):
        rounds.append(1)
        drafts = draft(asked, max_catch_up)
        for view in [request.view for request in asked if request.view.seq_id in drafts and len(rounds) % 2]:
            drafted = list(drafts[view.seq_id].token_ids)
            done = len(view.token_ids) - len(view.request.prompt_ids)
            whole.append(drafted == said[tuple(view.request.prompt_ids)][done : done + len(drafted)])
        return drafts

    drafter.draft, drafter._companion.compute, drafter._companion.chain = watched, spoilt, None
    assert completions(llm.generate(prompts_of(model), GREEDY, use_tqdm=False)) == completions(off)
    assert len(whole) > 10
    assert all(whole)


@PITFALLS.bug(10, "a head keeps what it computed from its own hidden states")
def kept_by_the_head(monkeypatch):
    monkeypatch.setattr(Eagle, "_max_right", 64)


@PITFALLS.bug(10, "a head goes on behind its own draft")
def not_taken_back(monkeypatch):
    resident_of = Eagle._resident

    def kept(self, view, members):
        resident = self._residents.get(view.seq_id)
        drafted = len(resident.drafted) if resident else 0
        found = resident_of(self, view, members)
        if found is not None and resident is not None:
            found.num_computed = min(found.num_computed + max(drafted - 2, 0), len(self._text(view)) - 1)
        return found

    monkeypatch.setattr(Eagle, "_resident", kept)


@PITFALLS.bug(10, "a draft model keeps what was rejected")
def kept_by_the_model(monkeypatch):
    resident_of = DraftModel._resident

    def kept(self, view, members):
        resident = self._residents.get(view.seq_id)
        if resident is not None and type(self) is DraftModel:
            came = view.token_ids[resident.num_computed : len(view.token_ids) - 1]
            resident.drafted = list(came)[: len(resident.drafted)]
        return resident_of(self, view, members)

    monkeypatch.setattr(DraftModel, "_resident", kept)


# ---- 11, 24: blocks and room


@PITFALLS.check(11)
def drafts_stay_within_their_blocks_and_the_context(world):
    """Drafts at every offset of a block, up to the end of the context, with few blocks and preemptions."""
    model = tiny(world)
    few = {"max_model_len": 40, "max_num_seqs": 4, "kv_cache_bytes": 100_000}
    for block_size in (2, 4, 8):
        for length in (9, 10, 11):
            prompts = [row.tolist() for row in model.prompt(length, batch=3)]
            params = SamplingParams(temperature=0, max_tokens=40 - length, ignore_eos=True)
            options = few | {"block_size": block_size}
            on_is_off(world, f"room {block_size} {length}", model, params, options, prompts)
    on_is_off(world, "preempted", model, GREEDY, {}, generate=generate_with_preemption)


@PITFALLS.bug(11, "drafts go beyond the context")
def beyond_the_context(monkeypatch):
    monkeypatch.setattr(StepDraft, "_within_limits", lambda self, seq, span, max_rows: span)
    room = Speculative._room
    monkeypatch.setattr(Speculative, "_room", lambda self, view: room(self, view) and self._max_draft_tokens)


@PITFALLS.bug(11, "blocks are reserved for what is known alone")
def not_reserved(monkeypatch):
    def place(self, seq, span):
        copies = self.cache.reserve(seq.seq_id, span.required().end)
        if copies is None:
            return False
        self.cache._sequences[seq.seq_id].reserved = span.end
        self.copies.extend(copies)
        self.spans.append((seq, span))
        self._take(seq, span, 1)
        return True

    monkeypatch.setattr(StepDraft, "place", place)


@PITFALLS.bug(11, "what was rejected counts as computed")
def rejected_is_final(monkeypatch):
    accept = Speculative.accept

    def all_of_it(self, view, span, sampled):
        accepted = accept(self, view, span, sampled)
        most = len(view.token_ids) + len(accepted.tokens) - span.start
        return accepted._replace(num_final=min(span.num_tokens, most))

    monkeypatch.setattr(Speculative, "accept", all_of_it)


@PITFALLS.check(24)
def drafts_without_room_change_no_hit(world):
    """Where a step has room for one token of each, drafts are proposed and none is computed: hits are those of off."""
    model = tiny(world)
    prompts = [[*prompt, *prompt[::-1]] for prompt in prompts_of(model)]

    short = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def hits(known=None):
        llm = LLM(str(model.folder.path), **TINY | {"max_num_batched_tokens": 3, "max_num_seqs": 3})
        strategy = None if known is None else verified(llm, known)
        found = []
        for _ in range(2):
            outputs = llm.generate(prompts, short, use_tqdm=False)
            turns = [[*p, *o.outputs[0].token_ids[:-2]] for p, o in zip(prompts, outputs)]
            found += [o.num_cached_tokens for o in outputs + llm.generate(turns, short, use_tqdm=False)]
        return found, strategy

    whole = LLM(str(model.folder.path), **TINY)
    _, known = world.once("room for one", lambda: known_outputs(whole, prompts, short))
    off, _ = world.once("hits of off", hits)
    on, _ = hits(known)
    assert on == off
    assert sum(off) > 100
    assert counted_as_verified(model, known, prompts)


def counted_as_verified(model, known, prompts):
    """Drafts are counted once they were computed: a step never has more rows than it has room for."""
    llm = LLM(str(model.folder.path), **TINY | {"max_num_batched_tokens": 8, "max_num_seqs": 3})
    strategy, computed = verified(llm, known), []
    plan = llm.engine.loop.scheduler.plan

    def watched():
        planned = plan()
        if planned is not None:
            assert planned.num_tokens <= 8
            computed.append(sum(span.num_optional for span in planned.spans))
        return planned

    llm.engine.loop.scheduler.plan = watched
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    counts, told = strategy.drafts()["oracle"], [o.outputs[0].timings.drafted for o in outputs]
    assert sum(one.verified for one in told) == counts.num_draft_tokens
    assert sum(one.accepted for one in told) == counts.num_accepted_tokens
    return counts.num_draft_tokens == sum(computed) > 0


@PITFALLS.bug(24, "what was proposed counts, computed or not")
def counted_when_proposed(monkeypatch):
    accept = Speculative.accept

    def counted(self, view, span, sampled):
        if (draft := self._drafts.get(view.seq_id)) is not None and not span.num_optional:
            self._stats[draft.method] = self._stats[draft.method].with_draft(len(draft.token_ids), 0)
        return accept(self, view, span, sampled)

    monkeypatch.setattr(Speculative, "accept", counted)
    monkeypatch.setattr(
        speculative,
        "lengths_of",
        lambda guesses, *_: {key: guess.num_tokens for key, guess in guesses.items()},
    )


# ---- 12, 13: recurrent states


def any_drafts(world, families, block_sizes):
    for family, seed in families:
        model = tiny(world, family, seed)
        for block_size in block_sizes:
            options = {"block_size": block_size, "max_model_len": 96, "max_num_batched_tokens": max(24, block_size)}
            on_is_off(world, f"{family} {block_size}", model, GREEDY, options, generate=generate_with_preemption)


@PITFALLS.check(12)
def a_state_has_what_was_accepted(world):
    """Any number of drafts, none in between, over every recurrent family and hybrid."""
    any_drafts(world, RECURRENT, [4])


@PITFALLS.bug(12, "a state keeps rejected tokens")
def rejected_in_the_state(monkeypatch):
    commit = StepCommit._commit
    monkeypatch.setattr(StepCommit, "_commit", lambda self, seq, num, logged=0: commit(self, seq, num, min(logged, 1)))


@PITFALLS.bug(12, "a state goes stale when no draft follows")
def stale_without_drafts(monkeypatch):
    commit = CacheManager.commit

    def kept(self, seq_id, token_ids, num_computed, num_logged=0):
        before = self._sequences[seq_id].num_logged
        commit(self, seq_id, token_ids, num_computed, num_logged or min(before, 1))

    monkeypatch.setattr(CacheManager, "commit", kept)


@PITFALLS.check(13)
def checkpoints_are_of_whole_states(world):
    """At every block size a second turn goes on from a checkpoint, and says what it says without the cache."""
    spacing, recurrent_groups.DECODE_CHECKPOINT_TOKENS = recurrent_groups.DECODE_CHECKPOINT_TOKENS, 16
    try:
        for family, seed in HYBRIDS[:2]:
            for block_size in (4, 8, 16, 64, 256):
                second_turn(world, tiny(world, family, seed), block_size)
    finally:
        recurrent_groups.DECODE_CHECKPOINT_TOKENS = spacing


def second_turn(world, model, block_size):
    sizes = {"block_size": block_size, "max_model_len": 112, "max_num_batched_tokens": max(24, block_size)}
    name, prompts = f"turn {model.config['model_type']} {block_size}", prompts_of(model)
    folder = str(model.folder.path)
    off, known = world.once(name, lambda: known_outputs(LLM(folder, **TINY | sizes), prompts, GREEDY))
    turns = [[*prompt, *o.outputs[0].token_ids] for prompt, o in zip(prompts, off)]
    again = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    cold = world.once(
        f"{name} cold", lambda: completions(LLM(folder, **TINY | sizes).generate(turns, again, use_tqdm=False))
    )
    llm = LLM(folder, **TINY | sizes | LOGGED)
    verified(llm, known)
    assert completions(llm.generate(prompts, GREEDY, use_tqdm=False)) == completions(off)
    second = llm.generate(turns, again, use_tqdm=False)
    assert completions(second) == cold
    if block_size <= 16:
        assert all(output.num_cached_tokens >= 32 for output in second), "no checkpoint of a drafted output"
    check_cache(llm.engine.loop.scheduler.cache, {})


@PITFALLS.bug(13, "a state with tokens in its log is shared")
def shared_with_a_log(monkeypatch):
    published = RecurrentGroup.published_block

    def careless(self, table, index, before, computed):
        logged, table.num_logged = table.num_logged, 0
        try:
            return published(self, table, index, before, computed)
        finally:
            table.num_logged = logged

    monkeypatch.setattr(RecurrentGroup, "published_block", careless)


@PITFALLS.bug(13, "drafts go across checkpoints")
def across_checkpoints(monkeypatch):
    monkeypatch.setattr(RecurrentGroup, "span_end", lambda self, computed, end, *, drafts: end)


# ---- 14: sliding windows


@PITFALLS.check(14)
def a_window_counts_what_was_accepted(world):
    """Rejections across the window's edge, at all windows of the family's tiny models and block sizes."""
    for family, seed in (("gemma3_text", 1), ("gemma3_text", 2), ("gemma2", 1), ("qwen3_moe", 2)):
        for block_size in (2, 4, 8):
            model = tiny(world, family, seed)
            for oracle in (Oracle, TreeOracle):
                name = f"{family} {seed} {block_size} {oracle.__name__}"
                on_is_off(world, name, model, GREEDY, {"block_size": block_size}, oracle=oracle)


@PITFALLS.bug(14, "rejected tokens push the oldest out of the window")
def freed_by_the_tail(monkeypatch):
    commit = SlidingGroup.commit
    monkeypatch.setattr(SlidingGroup, "commit", lambda self, table, computed: commit(self, table, computed + 6))


def change_branches(monkeypatch, change):
    """Have `change` write to the arrays of a step, of which it is told which spans are branches of trees."""
    fill = BatchBuilder._fill

    def changed(self, laid, plan, before):
        fill(self, laid, plan, before)
        change(laid.batch, sorted({span for _, span in laid.echoes}))

    monkeypatch.setattr(BatchBuilder, "_fill", changed)


@PITFALLS.bug(14, "the positions of a branch count what stands beside it")
def positions_are_slots(monkeypatch):
    def moved(step, branches):
        for rows in [step.spans()[span] for span in branches]:
            step.positions_T[rows] += 1

    change_branches(monkeypatch, moved)


@PITFALLS.bug(14, "the window of a branch counts what stands beside it")
def window_by_slot(monkeypatch):
    def wider(step, branches):
        step.kv_length_S[branches] += 1

    change_branches(monkeypatch, wider)


@PITFALLS.bug(14, "a branch sees the last of its siblings in place of what is on its way")
def no_way(monkeypatch):
    unfolded = batch._unfolded
    monkeypatch.setattr(batch, "_unfolded", lambda *given: (unfolded(*given)[0], []))


@PITFALLS.bug(14, "keys and values are kept of a sibling that was rejected")
def sibling_kept(monkeypatch):
    take_branch = CacheManager.take_branch
    monkeypatch.setattr(CacheManager, "take_branch", lambda self, seq_id, branch: take_branch(self, seq_id, 0))


# ---- 15, 16: a drafter that is smaller than the model


@PITFALLS.check(15)
def a_shorter_context_silences_the_drafter(world):
    model = tiny(world)
    shutil.copytree(model.folder.path, world.folder / "short", dirs_exist_ok=True)
    config = json.loads((world.folder / "short/config.json").read_text()) | {"max_position_embeddings": 24}
    (world.folder / "short/config.json").write_text(json.dumps(config))
    options = TINY | {"speculate": f"draft:{world.folder / 'short'}"} | FIXED
    off, _ = world.once("plain", lambda: plainly(model))
    llm = LLM(str(model.folder.path), **options)
    spans, compute = [], drafter_of(llm)._companion.compute

    def watched(plan):
        spans.extend(plan.spans)
        return compute(plan)

    drafter_of(llm)._companion.compute, drafter_of(llm)._companion.chain = watched, None
    assert completions(llm.generate(prompts_of(model), GREEDY, use_tqdm=False)) == completions(off)
    strategy = llm.engine.loop.scheduler.strategy
    assert strategy._model.failures == 0
    assert spans and max(span.end for span in spans) <= 24
    assert 0 < strategy.drafts()["draft"].num_draft_tokens <= 3 * (24 - 9)


@PITFALLS.bug(15, "the drafter is asked beyond its context")
def asked_beyond(monkeypatch):
    monkeypatch.setattr(DraftModel, "max_tokens", lambda self, view: 64)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("pitfalls"), None)


test_pitfall, test_a_planted_bug_is_caught = PITFALLS.tests()


def test_steps_without_drafts_find_a_block_that_was_there_for_a_draft(tmp_path, monkeypatch):
    """Drafts, all wrong, reach into the next block; the steps behind them come to it one token at a time."""
    model, turns = build("llama", 3, tmp_path), itertools.cycle([False] * 3 + [True] * 8)
    drafts = [next(turns)]
    monkeypatch.setattr(DraftControl, "step", lambda self, *told, **kind: drafts.append(next(turns)))
    monkeypatch.setattr(DraftControl, "rests", lambda self, num_decodes: not drafts[-1])
    monkeypatch.setattr(DraftControl, "window_steps", 3)
    monkeypatch.setattr(DraftControl, "choose", lambda self, n, survivals, *_, **__: list(map(len, survivals)))
    wrong = [model.spec.vocab_size - 1] * 3
    monkeypatch.setattr(ModelDrafts, "draft", lambda self, asked, most: {r.view.seq_id: Drafted(wrong) for r in asked})
    folder, off = str(model.folder.path), completions(plainly(model)[0])
    for num_threads in (1, 2):
        options = TINY | {"num_threads": num_threads, "num_speculative_tokens": 3, "draft_quantize": "none"}
        llm = LLM(folder, **options, speculate=f"draft:{folder}")
        for _ in range(2):
            outputs = llm.generate(prompts_of(model), GREEDY, use_tqdm=False)
            assert completions(outputs) == off
        assert llm.engine.loop.scheduler.strategy.drafts()["draft"].num_drafts > 10  # others rested
