"""Predict with a smaller model of the same vocabulary (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318).

Its cache follows the target's text at a distance of its own: it may lag behind, find other prefixes cached, and lose
its blocks alone. A round first catches up, then takes one step a drafted token, of all sequences together:

    known  a b c d | computed  a b | catches up with  c d → e | steps  e → f, f → g | drafted  e f g

By the rule `match` every token is sampled with the target's parameters and the random number of its place: where the
two distributions agree the same token comes out of both (drafter-invariant speculation, arXiv 2408.07978).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np

from ridgeline.core import step
from ridgeline.core.params import SamplingParams
from ridgeline.decoding.drafters import Companion, Drafted, DraftRequest, translated
from ridgeline.decoding.rejection import PROPOSAL
from ridgeline.decoding.strategy import SequenceView, row_after, sample_row

MAX_TOLD = 1 << 22  # numbers that say what drafted tokens were sampled from, of one round: they are written in each


def build(companion: Companion) -> "DraftModel":
    return DraftModel(companion)


@dataclass(slots=True)
class Resident:
    """A sequence in the draft model's cache: positions [0, num_computed) hold its tokens, then those of `drafted`.

    The first of `drafted` is the newest token that was known: its logits are computed again if nothing came.
    `num_checked` of its tokens are in the common vocabulary.
    """

    params: SamplingParams  # the target's, without what the target alone is asked for
    num_computed: int
    drafted: list[int] = field(default_factory=list[int])
    num_checked: int = 0


@dataclass(slots=True)
class _Chain:
    """A draft in the making: `row` decides its first token, up to `num_tokens` of them."""

    view: SequenceView
    num_tokens: int
    row: step.SampleRow
    features_1W: step.Vectors | None = None  # what a head reads beside the last token
    token_ids: list[int] = field(default_factory=list[int])
    weights: list[step.Weights] = field(default_factory=list[step.Weights])  # of each, where they are told

    def take(self, token: step.SampledToken, vocab_size: int) -> None:
        """Take a token, if the target has it; else the chain ends."""
        if token.error is not None or token.token_id >= vocab_size:
            self.num_tokens = len(self.token_ids)
        if len(self.token_ids) < self.num_tokens:
            self.token_ids.append(token.token_id)
            if token.weights is not None:
                self.weights.append(token.weights[:vocab_size])


class DraftModel:
    """Drafter over `companion`; the order of the residents is that of their last round, the latest last."""

    _max_right = 64  # positions of the last draft that hold the text's keys and values, if the text came so

    def __init__(self, companion: Companion) -> None:
        self._companion = companion
        self._cache = companion.cache
        self._residents: dict[int, Resident] = {}
        self._silent: set[int] = set()  # sequences with tokens that the draft model does not have
        self._step = 0

    @property
    def goes_on(self) -> bool:
        return self._companion.goes_on

    def max_tokens(self, view: SequenceView) -> int:
        if view.seq_id in self._silent:
            return 0
        return max(self._companion.max_model_len - len(view.token_ids) + 1, 0)  # the last one is never computed

    def lag(self, view: SequenceView) -> int:
        resident = self._residents.get(view.seq_id)
        done = resident.num_computed + len(resident.drafted) if resident else 0
        return max(len(view.token_ids) - self._begins(view) - done - 1, 0)

    def observe(self, running: Sequence[SequenceView], plan: step.StepPlan, taps: Sequence[step.Vectors]) -> None:
        """Do nothing: the text says it all."""

    def draft(self, asked: Sequence[DraftRequest], max_catch_up: int) -> Mapping[int, Drafted]:
        spans, copies, chains = self._begin(asked, max_catch_up)
        if not spans:
            return {}
        tables = tuple(zip(*[self._cache.tables(span.seq_id) for span in spans], strict=True))
        rows, features_TW = [chain.row for chain in chains], self._features(spans)
        is_whole = self._chain(spans, copies, chains, rows, tables, features_TW)
        if not is_whole:
            if features_TW is not None:
                assert self._companion.fold is not None, "a head computes with hidden states"
                features_TW = self._companion.fold(features_TW)
            self._run(spans, copies, chains, rows, tables, 0, features_TW)
        self._commit(asked, spans)
        if is_whole:
            for chain in chains:  # what they computed of what they sampled
                self._residents[chain.view.seq_id].drafted.extend(chain.token_ids[: chain.num_tokens - 1])
        else:
            self._follow(chains)
        return {chain.view.seq_id: Drafted(chain.token_ids, chain.weights) for chain in chains if chain.token_ids}

    def rounds(self, asked: Sequence[DraftRequest], most: int, least_room: int) -> step.Rounds | None:
        told = max(request.num_tokens for request in asked) * len(asked) * any(each.by_rejection for each in asked)
        if told * self._companion.vocab_size > MAX_TOLD:
            return None
        room, begins, length = list[int](), [self._begins(view) for view, *_ in asked], self._companion.max_model_len
        for (view, num_tokens, _), begin in zip(asked, begins):
            request, known, count = view.request, len(view.token_ids) - begin, 1 + num_tokens
            rest = request.max_tokens - len(view.token_ids) + len(request.prompt_ids)
            room.append(min(rest, length - known + 1, max(most * count, least_room)))
            further = room[-1] - count
            if further <= 0 or self._cache.reserve(view.seq_id, known + num_tokens - 1 + further) is None:
                return None
        tables = tuple(zip(*[self._cache.tables(view.seq_id) for view, *_ in asked], strict=True))
        stop_ids = [view.request.stop_ids for view, *_ in asked]
        return step.Rounds(most, room, stop_ids, begins, tables, self._max_right, proposal=PROPOSAL)

    def went_on(self, view: SequenceView, last: step.Span) -> None:
        if (resident := self._residents.get(view.seq_id)) is not None:
            resident.num_computed = last.start - self._begins(view)
            resident.drafted = list(last.token_ids[: 1 if last.matched > 0 or not last.num_optional else -1])
            self._committed(view, resident.num_computed)

    def forget(self, view: SequenceView) -> None:
        self._silent.discard(view.seq_id)
        self._release(view.seq_id)

    def _begin(
        self, asked: Sequence[DraftRequest], max_catch_up: int
    ) -> tuple[list[step.Span], list[step.BlockCopy], list[_Chain]]:
        """Return the step in which drafts begin: its spans, the longest drafts first, what to copy, and the drafts."""
        asked = sorted(asked, key=lambda request: -request.num_tokens)  # as chains want them
        members = {request.view.seq_id for request in asked}
        spans: list[step.Span] = []
        copies: list[step.BlockCopy] = []
        chains: list[_Chain] = []
        room = self._companion.max_step_tokens
        for index, (view, num_tokens, by_rejection) in enumerate(asked):
            behind = len(asked) - index - 1  # each keeps its newest token
            span = self._catch_up(view, num_tokens, min(room - behind, max_catch_up + 1), members, copies)
            if span is None:
                continue
            spans.append(span)
            room -= span.num_tokens
            max_catch_up -= span.num_tokens - 1
            if span.num_logit_rows:
                chains.append(_Chain(view, num_tokens, self._row(view, len(chains), by_rejection)))
        return spans, copies, chains

    def _commit(self, asked: Sequence[DraftRequest], spans: Sequence[step.Span]) -> None:
        """Take in a step that has computed known tokens."""
        by_id = {request.view.seq_id: request.view for request in asked}
        for span in spans:
            resident, final = self._residents[span.seq_id], span.end - span.num_logit_rows
            resident.num_computed = final
            resident.drafted.extend(span.token_ids[final - span.start :])
            self._committed(by_id[span.seq_id], final)

    def _committed(self, view: SequenceView, num_computed: int) -> None:
        """Tell the cache that its first positions have been computed for good."""
        self._cache.commit(view.seq_id, view.token_ids, num_computed, begins=self._begins(view))

    def _begins(self, view: SequenceView) -> int:
        """Return from which token on the text is in the cache, or will be."""
        return 0

    def _salt(self, view: SequenceView) -> str:
        """Return what has to be the same where prefixes are shared, beside the tokens in the cache."""
        return view.request.salt

    def _features(self, spans: Sequence[step.Span]) -> step.Vectors | None:
        """Return what is read beside the tokens of `spans`."""
        return None

    def _catch_up(
        self, view: SequenceView, num_tokens: int, max_tokens: int, members: set[int], copies: list[step.BlockCopy]
    ) -> step.Span | None:
        """Return the known tokens to compute, at most `max_tokens`, with their blocks and those of the draft reserved.

        None where the sequence has to do without drafts for now.
        """
        seq_id, begins = view.seq_id, self._begins(view)
        resident = self._resident(view, begins, members)
        if resident is None or max_tokens <= 0:
            return None
        known, start = len(view.token_ids) - begins, resident.num_computed
        end = min(start + max_tokens, known)
        needed = end if end < known else known + num_tokens - 1
        while (copied := self._cache.reserve(seq_id, needed)) is None:
            if not self._evict(members):
                return None
        copies.extend(copied)
        return step.Span(seq_id, start, view.token_ids[begins + start : begins + end], int(end == known))

    def _resident(self, view: SequenceView, begins: int, members: set[int]) -> Resident | None:
        """Return the sequence as the cache has it now, what was drafted and came about included."""
        seq_id, token_ids = view.seq_id, view.token_ids
        resident = self._residents.pop(seq_id, None)
        if resident is None:
            if seq_id in self._silent or not self._knows(view, 0):
                return None
            text = token_ids[begins:]
            while not self._cache.can_admit(text, self._salt(view)):
                if not self._evict(members):
                    return None
            cached = self._cache.admit(seq_id, text, self._salt(view))
            params = self._own_params(view.request.params)
            self._residents[seq_id] = resident = Resident(params, cached.num_tokens, num_checked=len(token_ids))
            return resident
        self._residents[seq_id] = resident
        if not self._knows(view, resident.num_checked):
            self._release(seq_id)
            return None
        came = token_ids[begins + resident.num_computed : -1]  # the newest token's row is needed anew
        pairs = zip(resident.drafted[: self._max_right], came)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if right:
            resident.num_computed += right
            self._committed(view, resident.num_computed)
        resident.num_checked = len(token_ids)
        resident.drafted.clear()
        return resident

    def _row(self, view: SequenceView, row: int, by_rejection: bool) -> step.SampleRow:
        """Return the row that decides the first token of a draft."""
        asked, params = sample_row(view, row), self._residents[view.seq_id].params
        return asked._replace(
            params=params,
            stop_ids=[t for t in asked.stop_ids if t < self._companion.vocab_size] if params.min_tokens else (),
            seed=asked.seed ^ PROPOSAL if by_rejection else asked.seed,
            tells_weights=by_rejection,
            allowed=None,  # a grammar's masks are the target's: where it says no, verifying does
        )

    def _own_params(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of drafts: the target's parameters, as far as they concern common tokens."""
        bias = {token: value for token, value in params.logit_bias.items() if token < self._companion.vocab_size}
        allowed = [token for token in params.allowed_token_ids if token < self._companion.vocab_size]
        return replace(params, logprobs=None, prompt_logprobs=None, logit_bias=bias, allowed_token_ids=allowed)

    def _knows(self, view: SequenceView, num_checked: int) -> bool:
        """Tell whether the tokens from `num_checked` on are in the common vocabulary, and remember if not."""
        if max(view.token_ids[num_checked:], default=0) < self._companion.vocab_size:
            return True
        self._silent.add(view.seq_id)
        return False

    def _chain(
        self,
        spans: Sequence[step.Span],
        copies: Sequence[step.BlockCopy],
        chains: Sequence[_Chain],
        rows: Sequence[step.SampleRow],
        tables: tuple[tuple[step.BlockTable, ...], ...],
        features_TW: step.Vectors | None,
    ) -> bool:
        """Compute a step and all that follows of `chains` in one call; False, with nothing done, if it cannot be."""
        if self._companion.chain is None or not chains:
            return False
        tells = any(row.tells_weights for row in rows)
        plain = [row._replace(tells_weights=False) for row in rows] if tells else rows
        plan = step.StepPlan(self._step + 1, spans, tables, tuple(copies), plain, features_TW=features_TW)
        chained = self._companion.chain(plan, [chain.num_tokens for chain in chains], tells=tells)
        if chained is None:
            return False
        self._step += 1
        for index, (chain, token_ids) in enumerate(zip(chains, chained.token_ids_KD.T.tolist(), strict=True)):
            chain.token_ids += token_ids[: token_ids.index(-1)] if -1 in token_ids else token_ids
            if chained.weights_KDV is not None and chain.row.tells_weights:
                chain.weights += map(self._common, chained.weights_KDV[: len(chain.token_ids), index])
        return True

    def _common(self, weights_V: step.Weights) -> step.Weights:
        """Return a distribution by the ids of the target, given that the token is in the common vocabulary."""
        ids_V = self._companion.token_ids_V
        return (weights_V if ids_V is None else translated(weights_V, ids_V))[: self._companion.vocab_size]

    def _follow(self, chains: list[_Chain]) -> None:
        """Compute a token of every chain a step, until all are as long as asked."""
        followed, block_size = 0, self._cache.layout.block_size
        tables: tuple[tuple[step.BlockTable, ...], ...] = ()
        last: list[_Chain] = []
        while chains := [chain for chain in chains if 0 < len(chain.token_ids) < chain.num_tokens]:
            spans: list[step.Span] = []
            for chain in chains:
                seq_id, drafted = chain.view.seq_id, chain.token_ids
                start = len(chain.view.token_ids) - self._begins(chain.view) + len(drafted) - 1
                spans.append(step.Span(seq_id, start, (drafted[-1],), 1))
                self._residents[seq_id].drafted.append(drafted[-1])
            if len(chains) != len(last):
                followed = 0
            if not followed or any(span.start % block_size == 0 for span in spans):  # else slots go on by one
                tables = tuple(zip(*[self._cache.tables(span.seq_id) for span in spans], strict=True))
            rows = [row_after(chain.row, row, chain.token_ids) for row, chain in enumerate(chains)]
            if any(r.tells_weights or r.params.needs_history or r.num_output <= r.params.min_tokens for r in rows):
                followed = 0
            features = [x for chain in chains if (x := chain.features_1W) is not None]
            features_TW = np.concatenate(features) if features else None
            followed = self._run(spans, (), chains, rows, tables, followed, features_TW)
            last = chains

    def _run(
        self,
        spans: Sequence[step.Span],
        copies: Sequence[step.BlockCopy],
        chains: Sequence[_Chain],
        rows: Sequence[step.SampleRow],
        tables: tuple[tuple[step.BlockTable, ...], ...],
        followed: int,
        features_TW: step.Vectors | None,
    ) -> int:
        """Compute a step, extend the chains by what was sampled in it, and return its number."""
        self._step += 1
        computed = (self._step, tuple(spans), tables, tuple(copies), tuple(rows))
        token_ids = [span.token_ids[0] for span in spans]
        plan = step.StepPlan(*computed, follows=followed, token_ids=token_ids, features_TW=features_TW)
        result = self._companion.compute(plan)
        ends = np.cumsum([span.num_tokens for span in spans])[[span.num_logit_rows > 0 for span in spans]]
        if result.taps_TW is not None:
            for chain, end in zip(chains, ends, strict=True):
                chain.features_1W = result.taps_TW[end - 1 : end]
        for chain, token in zip(chains, result.samples, strict=True):
            chain.take(token, self._companion.vocab_size)
        return plan.step

    def _evict(self, members: set[int]) -> bool:
        """Free the blocks of the sequence that has drafted least lately, unless all are in this round."""
        victim = next((seq_id for seq_id in self._residents if seq_id not in members), None)
        if victim is not None:
            self._release(victim)
        return victim is not None

    def _release(self, seq_id: int) -> None:
        if self._residents.pop(seq_id, None) is not None:
            self._cache.release(seq_id)
