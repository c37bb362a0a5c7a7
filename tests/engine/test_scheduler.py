"""The scheduler against an executor that reads every token back: whatever happens around it, an output is the same."""

import itertools

import pytest
from engine_fakes import VOCAB, Clock, Driver, make_layout, next_token
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import ridgeline.cache.groups.recurrent as recurrent_groups
from cache_invariants import max_sequence_tokens
from drafting import Drafting
from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.engine import pacing
from ridgeline.engine.request import FinishReason


def test_a_prompt_is_computed_in_chunks_while_others_decode():
    driver = Driver(make_layout((64,)), max_num_batched_tokens=4)
    driver.add("short", [1, 2], max_tokens=12)
    driver.step()
    driver.add("long", range(10), max_tokens=2)
    driver.step()
    plan = driver.executor.plans[-1]
    assert [span.num_tokens for span in plan.spans] == [1, 3]
    assert [span.num_logit_rows for span in plan.spans] == [1, 0]
    driver.run()
    driver.assert_answers()


def test_steps_of_the_same_lengths_share_their_batch():
    """Also where a block is full and the table gets another; each batch is compared with one that was made anew."""
    driver = Driver(make_layout((64,)), max_num_batched_tokens=8)
    driver.add("a", [1, 2, 3], max_tokens=12, ignore_eos=True)
    driver.run()
    starts = [plan.spans[0].start for plan in driver.executor.plans]
    assert starts == [0, *range(3, 14)]
    assert driver.executor.num_reused == len(starts[3:])  # the first two decode steps make the arrays
    driver.assert_answers()


def test_a_long_prompt_in_front_leaves_every_running_sequence_its_token():
    driver = Driver(make_layout((64,)), max_num_batched_tokens=4, policy="priority")
    for name in "ab":
        driver.add(name, [1], max_tokens=40)
    driver.step()
    driver.add("urgent", range(30), max_tokens=1, priority=-1)
    driver.step()
    assert driver.scheduler.running()[0].request.request_id == "urgent"
    driver.step()
    assert [span.num_tokens for span in driver.executor.plans[-1].spans] == [2, 1, 1]
    driver.run()
    driver.assert_answers()


def test_admission_counts_the_whole_prompt():
    """The second prompt fits the free blocks only until the first one has grown into its own."""
    driver = Driver(make_layout((6,)), max_num_batched_tokens=4)
    driver.add("a", range(16), max_tokens=1)
    driver.step()
    driver.add("b", range(20, 32), max_tokens=1)
    driver.step()
    assert [seq.request.request_id for seq in driver.scheduler.running()] == ["a"]
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0
    driver.assert_answers()


def test_priority_runs_first_and_fcfs_ignores_it():
    for policy, order in (("priority", ["b", "a"]), ("fcfs", ["a", "b"])):
        driver = Driver(make_layout((64,)), max_num_seqs=1, policy=policy)
        driver.add("running", [1], max_tokens=3)
        driver.step()
        driver.add("a", [2], priority=5)
        driver.add("b", [3], priority=-1)
        driver.run()
        assert [name for name, _ in driver.finished][1:] == order


def test_preemption_recomputes_to_the_same_answer():
    driver = Driver(make_layout((8,)), max_num_seqs=4, max_num_batched_tokens=16)
    for name in "abcd":
        driver.add(name, [ord(name), 1, 2], max_tokens=24, temperature=1.0)
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    driver.assert_answers()


def test_answers_of_one_request_share_the_prompt_and_differ():
    driver = Driver(make_layout((64,)), max_num_seqs=8, max_num_batched_tokens=16)
    driver.add("many", [5, 6, 7, 8, 9], n=4, max_tokens=6)
    driver.run()
    driver.assert_answers()
    computed = sum(plan.num_tokens for plan in driver.executor.plans)
    assert computed == 5 + 4 * 5  # the prompt once, then five further tokens for each
    assert any(plan.copies for plan in driver.executor.plans)
    assert len({tuple(tokens) for tokens in driver.tokens.values()}) == 4


def test_abort_before_fork_hands_the_prompt_over():
    driver = Driver(make_layout((64,)), max_num_batched_tokens=4)
    driver.add("many", range(10), n=3, max_tokens=2)
    driver.step()
    driver.take(driver.scheduler.finish("many", 0, FinishReason.STOP))
    driver.run()
    driver.assert_answers(skip={("many", 0)})
    assert ("many", 0) in driver.reasons


def test_prompt_logprobs_cover_every_token_once_also_after_preemption_and_a_warm_cache():
    driver = Driver(make_layout((64,)), max_num_seqs=2, max_num_batched_tokens=3)
    driver.add("warm", range(10), max_tokens=1)
    driver.run()
    driver.add("scored", range(10), max_tokens=3, prompt_logprobs=2)
    driver.step()
    driver.scheduler.preempt(driver.scheduler.running()[0])
    driver.run()
    assert [logprob.token_id for logprob in driver.prompt_logprobs["scored"]] == list(range(1, 10))
    driver.assert_answers()


def test_a_passed_deadline_ends_a_queued_and_a_running_request():
    driver = Driver(make_layout((64,)), max_num_seqs=1)
    driver.add("running", [1], max_tokens=50, deadline_s=driver.clock() + 5)
    driver.add("queued", [1], max_tokens=50, deadline_s=driver.clock() + 5)
    driver.step()
    driver.clock.now += 6
    driver.take(driver.scheduler.expire())
    assert driver.reasons == {
        ("running", 0): FinishReason.DEADLINE,
        ("queued", 0): FinishReason.DEADLINE,
    }
    assert not (driver.scheduler.running() or driver.scheduler.stats().num_waiting)
    driver.check()


def test_a_failed_step_ends_its_requests_and_no_others():
    driver = Driver(make_layout((64,)), max_num_seqs=1)
    driver.add("bad", [1], max_tokens=5)
    driver.add("good", [2], max_tokens=5)
    plan = driver.scheduler.plan()
    driver.take(driver.scheduler.fail(plan, "boom"))
    driver.run()
    assert driver.reasons[("bad", 0)] is FinishReason.ERROR
    assert driver.reasons[("good", 0)] is FinishReason.LENGTH


def test_stop_ids_wait_for_min_tokens():
    driver = Driver(make_layout((64,)))
    driver.add("stops", [3], max_tokens=200, ignore_eos=False)
    driver.add("waits", [3], max_tokens=200, ignore_eos=False, min_tokens=190)
    driver.run()
    driver.assert_answers()
    assert driver.reasons[("stops", 0)] is FinishReason.STOP
    assert len(driver.tokens["waits", 0]) >= 190


def test_the_context_length_ends_an_answer():
    driver = Driver(make_layout((64,)), max_model_len=12)
    driver.add("long", range(10), max_tokens=100)
    driver.run()
    assert len(driver.tokens["long", 0]) == 2
    assert driver.reasons[("long", 0)] is FinishReason.LENGTH


@pytest.mark.parametrize("size", [8, 64])
def test_finishing_unknown_or_finished_requests_is_ignored(size):
    driver = Driver(make_layout((size,)))
    driver.add("a", [1], max_tokens=1)
    driver.run()
    assert driver.scheduler.finish("a", None, FinishReason.ABORT) == []
    assert driver.scheduler.finish("never seen", None, FinishReason.ABORT) == []


class Guesses(Drafting):
    """Drafts `depth` tokens, of which the first `right` are what the model will say; takes at most `take` of them."""

    def __init__(self, depth=0, right=0, take=99):
        self.depth, self.right, self.take = depth, right, take

    def draft(self, view, max_tokens):
        tokens = list(view.token_ids)
        for i in range(min(self.depth, max_tokens)):
            token = next_token(tokens, view.seed, len(tokens) - len(view.request.prompt_ids))
            tokens.append(token if i < self.right else (token + 1) % VOCAB)
        return tokens[len(view.token_ids) :]

    def num_accepted(self, right):
        return min(right, self.take)


@pytest.mark.parametrize("windows", [(None,), (None, 5)])
@pytest.mark.parametrize(("right", "num_steps"), [(4, 5), (2, 8), (0, 20)])
def test_right_drafts_save_steps_and_wrong_ones_change_nothing(windows, right, num_steps):
    driver = Driver(make_layout((32,) * len(windows), windows), strategy=Guesses(4, right), max_num_rows=8)
    driver.add("a", [1, 2, 3], max_tokens=20)
    driver.run()
    driver.assert_answers()
    assert len(driver.executor.plans) == num_steps  # the first one has no draft


def test_tokens_behind_a_stop_are_not_gained():
    driver = Driver(make_layout((64,)), strategy=Guesses(5, 5), max_num_rows=8)
    driver.add("stops", [3], max_tokens=200, ignore_eos=False)
    driver.run()
    driver.assert_answers()
    assert driver.reasons["stops", 0] is FinishReason.STOP


def test_optional_tokens_never_cost_a_sequence_its_blocks():
    """Three sequences fill the cache to its last block; what two of them reserve for drafts is given back in time."""
    for strategy in (Guesses(), Guesses(6, 0), Guesses(6, 3)):
        driver = Driver(
            make_layout((9,)), strategy=strategy, max_num_seqs=3, max_num_batched_tokens=24, max_num_rows=24
        )
        for name in "abc":
            driver.add(name, [ord(name), 1, 2, 3], max_tokens=9)
        driver.run()
        driver.assert_answers()
        assert driver.scheduler.stats().num_preemptions == 0
        if strategy.depth:
            assert max(span.num_optional for plan in driver.executor.plans for span in plan.spans) > 0


def test_rows_of_logits_have_a_bound_of_their_own():
    """Every sequence keeps its row; the oldest draft with what is left."""
    driver = Driver(
        make_layout((64,)), strategy=Guesses(4, 4), max_num_seqs=4, max_num_batched_tokens=40, max_num_rows=6
    )
    for name in "abcd":
        driver.add(name, [ord(name), 1], max_tokens=12)
    driver.run()
    driver.assert_answers()
    assert [span.num_logit_rows for span in driver.executor.plans[1].spans] == [3, 1, 1, 1]


def test_several_answers_have_no_drafts_before_they_part():
    class Eager(Guesses):
        def next_span(self, view, max_tokens, *, score_all):
            """Drafts behind the prompt, too."""
            span = Autoregressive.next_span(self, view, max_tokens, score_all=score_all)
            guess = self.draft(view, max_tokens - span.num_tokens)
            if span.end < len(view.token_ids) or not guess:
                return span
            return span._replace(
                token_ids=[*span.token_ids, *guess], num_logit_rows=1 + len(guess), num_optional=len(guess)
            )

    for n in (1, 3):
        driver = Driver(make_layout((64,)), strategy=Eager(2, 2), max_num_seqs=4, max_num_rows=8)
        driver.add("many", [5, 6, 7, 8], n=n, max_tokens=6)
        driver.run()
        driver.assert_answers()
        assert driver.executor.plans[0].spans[0].num_optional == (2 if n == 1 else 0)


def test_a_strategy_hears_of_every_step_before_and_after():
    class Listening(Autoregressive):
        one_token = False  # hears of the steps that it plans

        def __init__(self):
            self.heard = []

        def begin(self, running, room):
            self.heard.append(("begin", [view.seq_id for view in running], *room))

        def observe(self, plan, result, seconds):
            self.heard.append(("observe", plan.step, len(result.samples), seconds))
            raise RuntimeError("this harms no output")

    driver = Driver(make_layout((64,)), strategy=Listening(), max_num_seqs=2, max_num_batched_tokens=6, max_num_rows=3)
    for name in "abc":
        driver.add(name, [ord(name), 1], max_tokens=2)
    driver.run()
    driver.assert_answers()
    assert driver.strategy.heard[:4] == [
        ("begin", [], 6, 3),
        ("observe", 1, 2, 0.25),
        ("begin", [0, 1], 4, 1),
        ("observe", 2, 2, 0.25),
    ]


def test_a_plan_says_what_was_decided():
    driver = Driver(make_layout((6,)), max_num_seqs=2, max_num_batched_tokens=8, prefix_caching=False)
    for name in "abc":
        driver.add(name, [ord(name), 1, 2], max_tokens=16)
    driver.step()
    first = driver.executor.plans[0].decisions
    assert [(a.seq_id, a.num_cached) for a in first.admitted] == [(0, 0), (1, 0)]
    assert all(a.reason for a in first.admitted)
    assert first.head_waits == "slots"
    driver.run()
    driver.assert_answers()
    decided = [plan.decisions for plan in driver.executor.plans]
    preempted = [p for decisions in decided for p in decisions.preempted]
    assert (preempted[0].seq_id, preempted[0].for_seq_id) == (1, 0)
    assert len(preempted) == driver.scheduler.stats().num_preemptions
    assert all(decisions.head_waits == "just_preempted" for decisions in decided if decisions.preempted)
    assert {decisions.head_waits for decisions in decided} >= {None, "slots", "blocks", "just_preempted"}


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, steps, aborts, preemptions and time over a small cache."""

    blocks = (12,)
    windows = (None,)
    policy = "fcfs"
    caching = True
    drafts = False
    plans_in_flight = 1
    chains = False
    ratio = None

    def __init__(self):
        super().__init__()
        layout = make_layout(self.blocks, self.windows, max_span_tokens=6)
        self.driver = Driver(
            layout,
            max_num_seqs=3,
            max_num_batched_tokens=6,
            policy=self.policy,
            prefix_caching=self.caching,
            strategy=Guesses() if self.drafts else None,
            max_num_rows=5,
            depth=self.plans_in_flight,
            chains=self.chains,
            max_model_len=min(24, max_sequence_tokens(layout)),
            max_itl_ratio=self.ratio,
        )
        self.names = (f"r{i}" for i in itertools.count())
        self.live = []

    @rule(
        prompt=st.integers(1, 16),
        shared=st.integers(0, 10),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 8),
        priority=st.integers(-1, 1),
        scored=st.sampled_from([None, None, None, 1]),
        eos=st.booleans(),
        client=st.integers(0, 2),
        call=st.integers(0, 2),
    )
    def add(self, prompt, shared, n, max_tokens, priority, scored, eos, client, call):
        name = next(self.names)
        tokens = [*range(shared), *(100 + int(name[1:]) * 31 % 7 + i for i in range(prompt))][:20]
        self.driver.add(
            name,
            tokens,
            n=n,
            max_tokens=max_tokens,
            priority=priority,
            prompt_logprobs=scored,
            ignore_eos=not eos,
            client=client,
            call=call and 10 * client + call,
        )
        self.live.append(name)

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.drafts)
    @rule(depth=st.integers(0, 5), right=st.integers(0, 5), take=st.integers(0, 5))
    def draft(self, depth, right, take):
        """From now on: so many tokens, so many of them right, and at most so many taken."""
        strategy = self.driver.strategy
        strategy.depth, strategy.right, strategy.take = depth, right, take

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 1000), index=st.sampled_from([None, 0, 1]))
    def abort(self, pick, index):
        name = self.live[pick % len(self.live)]
        self.driver.take(self.driver.scheduler.finish(name, index, FinishReason.ABORT))

    @precondition(lambda self: self.driver.scheduler.running())
    @rule(pick=st.integers(0, 1000))
    def preempt(self, pick):
        running = self.driver.scheduler.running()
        self.driver.scheduler.preempt(running[pick % len(running)])

    @rule(seconds=st.integers(0, 3))
    def pass_time(self, seconds):
        self.driver.clock.now += seconds

    @invariant()
    def nothing_is_lost(self):
        self.driver.check()

    def teardown(self):
        self.driver.run()
        self.driver.assert_answers(skip=self.driver.cut_short())
        self.driver.check()
        assert set(self.driver.reasons) == self.driver.submitted()


VARIANTS = {
    "full": {},
    "priority": {"policy": "priority"},
    "uncached": {"caching": False},
    "paced": {"ratio": 1.0},
    "paced_drafts_two_chained": {"ratio": 1.0, "drafts": True, "plans_in_flight": 2, "chains": True},
    "hybrid": {"blocks": (12, 9), "windows": (None, 5)},
    "recurrent": {"blocks": (6,), "windows": ("recurrent",)},
    "full_and_recurrent": {"blocks": (12, 5), "windows": (None, "recurrent")},
    "drafts": {"drafts": True},
    "drafts_hybrid": {"drafts": True, "blocks": (12, 9), "windows": (None, 5)},
    "drafts_uncached": {"drafts": True, "caching": False, "blocks": (9,)},
    "drafts_recurrent": {"drafts": True, "blocks": (8,), "windows": ("logged",)},
    "drafts_full_and_recurrent": {"drafts": True, "blocks": (12, 6), "windows": (None, "logged")},
    "drafts_recurrent_uncached": {"drafts": True, "caching": False, "blocks": (6,), "windows": ("logged",)},
    "two_in_flight_drafts_recurrent": {
        "plans_in_flight": 2,
        "drafts": True,
        "blocks": (12, 6),
        "windows": (None, "logged"),
    },
    "two_chained_drafts_recurrent": {
        "plans_in_flight": 2,
        "chains": True,
        "drafts": True,
        "blocks": (12, 6),
        "windows": (None, "logged"),
    },
    "two_in_flight": {"plans_in_flight": 2},
    "three_in_flight": {"plans_in_flight": 3},
    "three_in_flight_uncached": {"plans_in_flight": 3, "policy": "priority", "caching": False, "blocks": (8,)},
    "two_in_flight_hybrid": {"plans_in_flight": 2, "blocks": (12, 9), "windows": (None, 5)},
    "two_in_flight_recurrent": {"plans_in_flight": 2, "blocks": (12, 5), "windows": (None, "recurrent")},
    "two_chained": {"plans_in_flight": 2, "chains": True},
    "three_chained": {"plans_in_flight": 3, "chains": True},
    "three_chained_uncached": {"plans_in_flight": 3, "chains": True, "policy": "priority", "caching": False},
    "three_chained_hybrid": {"plans_in_flight": 3, "chains": True, "blocks": (12, 9), "windows": (None, 5)},
    "two_chained_recurrent": {"plans_in_flight": 2, "chains": True, "blocks": (12, 5), "windows": (None, "recurrent")},
    "two_chained_drafts": {"plans_in_flight": 2, "chains": True, "drafts": True},
    "two_in_flight_drafts": {"plans_in_flight": 2, "drafts": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_use_keeps_every_answer_and_every_block(variant, monkeypatch):
    monkeypatch.setattr(recurrent_groups, "DECODE_CHECKPOINT_TOKENS", 8)
    monkeypatch.setattr(pacing, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(pacing, "MAX_UNMEASURED", 4)
    machine = type(f"{variant}_machine", (SchedulerMachine,), VARIANTS[variant])
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_clock_is_the_only_source_of_time():
    clock = Clock()
    driver = Driver(make_layout((64,)), clock=clock)
    driver.add("a", [1, 2], max_tokens=3)
    for _ in range(3):
        clock.now += 1
        driver.step()
    (timings,) = (event.timings for event in driver.finish_events)
    assert (timings.queue_s, timings.ttft_s, timings.latency_s, timings.tpot_s) == (1, 1, 3, 1)


def test_a_second_turn_goes_on_from_the_checkpoint_of_the_first_prompt():
    driver = Driver(make_layout((64, 8), (None, "recurrent")), max_num_batched_tokens=32)
    prompt = list(range(1, 15))  # of 14 tokens, 12 are whole blocks
    driver.add("a", prompt, max_tokens=3)
    driver.run()
    assert [span.end for plan in driver.executor.plans for span in plan.spans][:2] == [12, 14]
    driver.add("b", [*prompt, 40, 41, 42, 43, 44], max_tokens=3)
    driver.run()
    (second,) = (event for event in driver.finish_events if event.request.request_id == "b")
    assert second.cached.num_tokens == 12
    driver.assert_answers()
