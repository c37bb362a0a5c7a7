"""A fake model behind the real scheduler and cache: a hash of the tokens that it reads back through the block tables.

A wrong block, a lost copy or a token in the wrong place is a wrong output.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from cache_invariants import check_cache
from ridgeline.backends.step import StepBatch
from ridgeline.cache.layout import CacheLayout, GroupLayout
from ridgeline.cache.manager import CacheManager
from ridgeline.core.config import SchedulerConfig
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import PENDING, BlockTable, SampledToken, StepPlan, StepResult, TokenLogprob
from ridgeline.decoding.request import Request
from ridgeline.decoding.sampling import Sampler
from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.engine.batch import BatchBuilder
from ridgeline.engine.request import (
    SEED_STRIDE,
    DecodeEvent,
    FinishEvent,
    FinishReason,
    PromptLogprobsEvent,
    TokenEvent,
    TokensEvent,
)
from ridgeline.engine.scheduler import Scheduler

VOCAB = 50
EOS = 0


def next_token(tokens, seed, num_output):
    """The fake model: one token from everything before it and the random stream's place."""
    digest = hashlib.sha256(repr((list(tokens), seed, num_output)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % VOCAB


def assert_same(one, other):
    """Equal batches, or parts of them."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, Sequence):
        assert len(one) == len(other)
        for pair in zip(one, other):
            assert_same(*pair)
    elif hasattr(one, "__dataclass_fields__"):
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    else:
        assert one == other


class Ring:
    """Rows of a log, by the positions of tokens."""

    def __init__(self, rows, held):
        self.rows, self.held = rows, held

    def __getitem__(self, position):
        return self.held[position % self.rows]

    def __setitem__(self, position, token):
        self.held[position % self.rows] = token


class FakeExecutor:
    """Keeps a memory of (group, slot) -> token, written and copied exactly as the plan says.

    A recurrent group's block holds, in its first slot, all tokens of the sequence but those in its log.

    Up to `depth` plans are in flight: a
    plan is computed when it is collected, over the block tables as they were when it was submitted.
    """

    def __init__(self, layout, depth=1, *, chains=False):
        self.depth = depth
        self.chains = chains
        self.sampled = {}  # by step and sequence
        self.num_pending = 0
        self.observer = None
        self.in_flight = deque()
        self.layout = layout
        self.memory = {}
        self.logs = {}
        self.plans = []
        self.batches = BatchBuilder(layout)
        self.sampler = Sampler()
        self.num_reused = 0
        self.num_overlapping = 0
        self.laid = []  # the last two batches

    def hurry(self, asked: bool) -> None:
        """A step has one round."""

    def lay_out(self, plan: StepPlan) -> None:
        """A step that is written into the arrays of the last one is what it would be in its own."""
        goes_on = self.batches.goes_on(plan)
        sampling = self.sampler.sampling_metadata(plan.samples, follows=goes_on)
        before = self.laid[-1].block.copy() if goes_on else None
        batch = self.batches.build(plan, sampling)
        assert before is None or np.array_equal(self.laid[-1].block, before), "what may still be computed was changed"
        assert_same(batch, BatchBuilder(self.layout).build(plan, Sampler().sampling_metadata(plan.samples)))
        assert_same(batch, StepBatch.view(np.frombuffer(batch.block.tobytes(), dtype=np.int64)))
        self.num_reused += any(batch is one for one in self.laid)
        self.laid = [*self.laid[-1:], batch]

    def submit(self, plan: StepPlan) -> None:
        assert len(self.in_flight) < self.depth
        self.num_overlapping += bool(self.in_flight)
        self.plans.append(plan)
        self.lay_out(plan)
        tables = ((BlockTable(t.first_token, tuple(t.blocks), t.num_logged) for t in tables) for tables in plan.tables)
        self.in_flight.append(plan._replace(tables=tuple(map(tuple, tables))))

    def collect(self) -> StepResult:
        return self.compute(self.in_flight.popleft())

    def compute(self, plan: StepPlan) -> StepResult:
        size = self.layout.block_size
        plan = plan._replace(spans=tuple(map(self.resolved, plan.spans)))
        for copy in plan.copies:
            for offset in range(size):
                source = (copy.group, copy.source * size + offset)
                self.memory[copy.group, copy.target * size + offset] = self.memory.get(source)
        for index, span in enumerate(plan.spans):
            for group, tables in enumerate(plan.tables):
                if self.layout.groups[group].kind == "recurrent":
                    self.advance(group, tables[index], span)
                    continue
                for position, token in enumerate(span.token_ids, span.start):
                    self.memory[group, self.slot(tables[index], position)] = token
        by_row = self.positions_by_row(plan)
        samples = []
        for row in plan.samples:
            seen = self.read(plan, *by_row[row.row])
            token = next_token(seen, row.seed, row.num_output)
            logprob = TokenLogprob(token, -1.0, 1, ()) if row.params.logprobs is not None else None
            samples.append(SampledToken(row.seq_id, token, logprob))
            self.sampled[plan.step, row.seq_id] = token
        scored = tuple(TokenLogprob(row.token_id, -2.0, 1, ()) for row in plan.prompt_rows)
        return StepResult(plan.step, tuple(samples), scored)

    def resolved(self, span):
        """The span with the token that an earlier step has sampled: as a device would, which does not wait for it."""
        assert (PENDING in span.token_ids) == (span.token_ids[-1] == PENDING) == bool(span.pending)
        if not span.pending:
            return span
        self.num_pending += 1
        token = self.sampled.get((span.pending, span.seq_id), 0)  # of a step that failed: any token will do
        return span._replace(token_ids=[*span.token_ids[:-1], token], pending=0)

    def advance(self, group, table, span):
        slot, log = table.blocks[0] * self.layout.block_size, self.log(group, table)
        before = self.memory[group, slot] if span.start > table.num_logged else ()
        assert len(before) == span.start - table.num_logged, "a state of another number of tokens"
        before += tuple(log[position] for position in range(len(before), span.start))
        self.memory[group, slot] = before if span.num_optional else (*before, *span.token_ids)
        if span.num_optional:
            for position, token in enumerate(span.token_ids, span.start):
                log[position] = token

    def log(self, group, table):
        """A block's log by position; it belongs to the block alone, and copies of it have none."""
        rows = self.layout.groups[group].log_rows
        return Ring(rows, self.logs.setdefault((group, table.blocks[0]), {}))

    def slot(self, table, position):
        offset = position - table.first_token
        assert offset >= 0, "a write below the table"
        return table.blocks[offset // self.layout.block_size] * self.layout.block_size + offset % self.layout.block_size

    def positions_by_row(self, plan):
        """(span, position) of every row of logits."""
        return [
            (index, position)
            for index, span in enumerate(plan.spans)
            for position in range(span.end - span.num_logit_rows, span.end)
        ]

    def read(self, plan, index, last):
        """Span `index`'s sequence up to position `last`, from the full group; a sliding group must agree within its
        window."""
        full = None
        for group, layout in enumerate(self.layout.groups):
            table = plan.tables[group][index]
            if layout.kind == "recurrent":
                tokens = list(self.memory[group, table.blocks[0] * self.layout.block_size])
                if plan.spans[index].num_optional:
                    log = self.log(group, table)
                    tokens += [log[position] for position in range(len(tokens), last + 1)]
                assert len(tokens) == last + 1, "a state is that of the whole span"
                full = tokens if full is None else full
                assert full == tokens, f"group {group} disagrees"
                continue
            first = 0 if layout.window is None else max(0, last + 1 - layout.window)
            tokens = [self.memory[group, self.slot(table, position)] for position in range(first, last + 1)]
            full = tokens if full is None else full
            assert full[first:] == tokens, f"group {group} disagrees"
        return full


def make_request(name, prompt, clock, **options):
    priority, deadline_s = options.pop("priority", 0), options.pop("deadline_s", None)
    client, background = options.pop("client", 0), options.pop("background", False)
    call = options.pop("call", 0)
    options.setdefault("max_tokens", 5)
    ignore_eos = options.setdefault("ignore_eos", True)
    params = SamplingParams(**options)
    return Request(
        request_id=name,
        prompt_ids=tuple(prompt),
        params=params,
        arrival_s=clock(),
        seed=options.get("seed", 7),
        max_tokens=params.max_tokens,
        stop_ids=frozenset() if ignore_eos else frozenset({EOS}),
        priority=priority,
        deadline_s=deadline_s,
        client=client,
        call=call,
        background=background,
    )


def expected_tokens(request, index, max_model_len):
    """What the fake model generates for one output when nothing else is in the machine."""
    seed = (request.seed + index * SEED_STRIDE) % 2**64
    tokens = list(request.prompt_ids)
    out = []
    while len(out) < request.max_tokens and len(tokens) < max_model_len:
        token = next_token(tokens, seed, len(out))
        tokens.append(token)
        out.append(token)
        if token in request.stop_ids and len(out) >= request.params.min_tokens:
            break
    return out


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make_layout(blocks, windows=(None,), block_size=4, max_span_tokens=None):
    """Groups by their number of blocks, and their windows: None, a number of tokens, "recurrent" or "logged"."""
    groups = tuple(make_group(*group) for group in zip(range(len(blocks)), windows, blocks, strict=True))
    return CacheLayout(block_size, groups, max_span_tokens)


def make_group(index, window, count):
    if window in ("recurrent", "logged"):
        max_logged = 4 if window == "logged" else 0
        return GroupLayout("recurrent", (index,), None, 0, count, bytes_per_sequence=8, max_logged=max_logged)
    return GroupLayout("full" if window is None else "sliding", (index,), window, 8, count)


class Driver:
    """Scheduler, cache and fake model run by hand, with everything that was answered."""

    def __init__(
        self,
        layout,
        *,
        clock=None,
        strategy=None,
        prefix_caching=True,
        max_model_len=1000,
        max_num_rows=None,
        depth=1,
        chains=False,
        **config,
    ):
        config.setdefault("max_num_seqs", 4)
        config.setdefault("max_num_batched_tokens", 8)
        self.config = SchedulerConfig(**config)
        self.clock = clock or Clock()
        self.max_model_len = max_model_len
        self.cache = CacheManager(layout, prefix_caching=prefix_caching)
        self.executor = FakeExecutor(layout, depth, chains=chains)
        self.in_flight = deque()
        self.strategy = strategy or Autoregressive()
        self.max_num_rows = max_num_rows or self.config.max_num_seqs
        self.scheduler = Scheduler(
            self.config, self.cache, self.strategy, max_model_len, self.max_num_rows, self.clock, depth, chains=chains
        )
        self.requests, self.tokens, self.reasons, self.prompt_logprobs = {}, {}, {}, {}
        self.finished, self.finish_events = [], []

    def add(self, name, prompt, **options):
        self.requests[name] = make_request(name, prompt, self.clock, **options)
        self.scheduler.add(self.requests[name])

    def step(self):
        """Plans as far ahead as the executor allows, and takes in the oldest step, as EngineLoop does."""
        heard = False
        while len(self.in_flight) < self.executor.depth:
            plan = self.scheduler.plan()
            ended = self.scheduler.take_events()
            self.take(ended)
            heard = heard or bool(ended)
            if plan is None:
                break
            self.check_plan(plan)
            self.executor.submit(plan)
            self.in_flight.append(plan)
        if not self.in_flight:
            return heard
        self.take(self.scheduler.commit(self.in_flight.popleft(), self.executor.collect(), seconds=0.25))
        return True

    def check_plan(self, plan):
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        scored = {seq.seq_id for seq in self.scheduler.running() if seq.request.params.prompt_logprobs is not None}
        assert sum(span.num_logit_rows for span in plan.spans if span.seq_id not in scored) <= self.max_num_rows
        assert len({span.seq_id for span in plan.spans}) == len(plan.spans)

    def run(self, limit=2000):
        steps = 0
        while (self.scheduler.running() or self.scheduler.stats().num_waiting) or self.in_flight:
            assert self.step(), "work is left but nothing is planned"
            steps += 1
            assert steps < limit, "the scheduler goes in circles"

    def take(self, events):
        for event in events:
            if isinstance(event, DecodeEvent):
                gained = zip(event.seqs, event.tokens)
                self.take([TokenEvent(s.request, s.index, token.token_id, token.logprob, False) for s, token in gained])
                continue
            if isinstance(event, TokensEvent):
                self.take([TokenEvent(event.request, event.index, each, None, False) for each in event.token_ids])
                continue
            name = event.request.request_id
            match event:
                case TokenEvent():
                    assert (name, event.index) not in self.reasons, "a token after the end"
                    self.tokens.setdefault((name, event.index), []).append(event.token_id)
                case FinishEvent():
                    assert (name, event.index) not in self.reasons, "two ends"
                    self.reasons[name, event.index] = event.reason
                    self.finished.append((name, event.index))
                    self.finish_events.append(event)
                case PromptLogprobsEvent():
                    self.prompt_logprobs.setdefault(name, []).extend(event.logprobs)

    def submitted(self):
        return {(name, index) for name, request in self.requests.items() for index in range(request.params.n)}

    def cut_short(self):
        return {key for key, reason in self.reasons.items() if reason is FinishReason.ABORT}

    def assert_answers(self, skip=()):
        for name, index in self.submitted():
            expected = expected_tokens(self.requests[name], index, self.max_model_len)
            got = self.tokens.get((name, index), [])
            if (name, index) in skip:
                assert got == expected[: len(got)], f"{name}[{index}]"
            else:
                assert got == expected, f"{name}[{index}]"

    def check(self):
        """Every unfinished output is in one place, the limits hold, and the cache's books balance."""
        running = self.scheduler.running()
        check_cache(self.cache, {seq.seq_id: seq.token_ids for seq in running})
        assert sum(1 + len(seq.siblings) for seq in running) <= self.config.max_num_seqs
        held = {(seq.request.request_id, seq.index) for seq in running}
        held |= {(seq.request.request_id, sibling.index) for seq in running for sibling in seq.siblings}
        unfinished = self.submitted() - set(self.reasons)
        assert held <= unfinished
        assert bool(self.scheduler.running() or self.scheduler.stats().num_waiting) == bool(unfinished)
        if not unfinished:
            assert all(group.used == 0 for group in self.cache.stats().groups)
