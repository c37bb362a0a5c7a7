"""Drafts what followed most often where the longest match stood (SuffixDecoding, arXiv 2411.04975).

The text itself is looked through, and a pool of finished outputs: of requests with an equal salt and adapter, since how
fast a step goes tells what was accepted. Native code, over n-gram chains: some µs a lookup and 70 bytes a token.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ridgeline.core.errors import ConfigError
from ridgeline.core.speculation import SpeculationConfig
from ridgeline.core.step import Rounds
from ridgeline.decoding.proposers import Draft, Gains
from ridgeline.decoding.strategy import SequenceView, num_left

if TYPE_CHECKING:
    from ridgeline._native import SuffixIndex

LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24)  # of matches that are looked for; longer ones are told apart up to the depth
NUM_LENGTHS = 5  # of matches that drafts are told apart by: 1, 2-3, 4-7, 8-15, 16 and more tokens
MAX_TEXT_TOKENS = 2**28
POOL_TOKENS, MAX_POOLS = 2**16, 14  # 4.4 MB each, 62 MB in all


def build(config: SpeculationConfig) -> "Suffix":
    """Build the proposer. Raises ConfigError without the native module."""
    try:
        from ridgeline._native import SuffixIndex
    except ImportError as error:
        raise ConfigError("speculate=suffix needs the native module, which is not built; use ngram") from error
    return Suffix(SuffixIndex, config)


class Suffix:
    """Keeps an index for each sequence that runs, and the pools, the one that was used last at the end."""

    def __init__(self, index: type["SuffixIndex"], config: SpeculationConfig) -> None:
        depth = config.suffix_decoding_max_tree_depth
        self._index, self._depth = index, depth
        self._lengths = [*(length for length in LENGTHS if length < depth), depth]
        self._factor = config.suffix_decoding_max_spec_factor
        self._min_probability = config.suffix_decoding_min_token_prob
        self._max_documents = config.suffix_decoding_max_cached_requests
        self._texts: dict[int, SuffixIndex] = {}
        self._matched: dict[int, int] = {}  # how many of the last tokens of each sequence its text had before
        self._pooled: set[int] = set()  # sequences whose last draft is from a pool
        self._pools: OrderedDict[tuple[str, int], SuffixIndex] = OrderedDict()

    def propose(self, view: SequenceView, max_tokens: int) -> Draft | None:
        text = self._texts.get(view.seq_id)
        if text is None:
            text = self._texts[view.seq_id] = self._index(self._lengths, MAX_TEXT_TOKENS)
        text.extend(list(view.token_ids[text.num_tokens :]))
        limits = max_tokens, self._factor, self._min_probability
        found, pooled = text.find_own(*limits), False
        self._matched[view.seq_id] = found[1] if found is not None else 0
        if (pool := self._pools.get((view.request.salt, view.request.adapter))) is not None and self._pools_for(view):
            other = pool.find(list(view.token_ids[-self._depth :]), *limits)
            if other is not None and (found is None or other[3] > found[3]):
                found, pooled = other, True
        if found is None:
            return None
        (self._pooled.add if pooled else self._pooled.discard)(view.seq_id)
        tokens, num_matched, agreement, _ = found
        return Draft(tokens, _evidence(num_matched, agreement, pooled=pooled))

    def rounds(self, views: Sequence[SequenceView], most: int, num_tokens: Sequence[int]) -> Rounds | None:
        if not all(map(self.is_own, views)):
            return None
        texts, stop_ids = [self._texts[view.seq_id] for view in views], [view.request.stop_ids for view in views]
        room = [min(num_left(view), most * (1 + drafted)) for view, drafted in zip(views, num_tokens, strict=True)]
        return Rounds(most, room, stop_ids, texts=texts, limits=self.limits)

    @property
    def limits(self) -> tuple[float, float]:
        return self._factor, self._min_probability

    def is_own(self, view: SequenceView) -> bool:
        return view.seq_id not in self._pooled

    def evidence(self, num_matched: int) -> int:
        return _evidence(num_matched, 1.0, pooled=False)

    def watched(self, view: SequenceView, max_tokens: int, gains: Gains, *, ends: bool) -> tuple[object, int]:
        for bits in range(NUM_LENGTHS):
            num_matched = 1 << bits
            num_tokens = min(int(self._factor * num_matched), max_tokens)
            if num_tokens and gains(self.evidence(num_matched), num_tokens):
                is_there = ends and self._matched[view.seq_id] >= num_matched  # and yet a model drafts
                return self._texts[view.seq_id], MAX_TEXT_TOKENS if is_there else num_matched
        return self._texts[view.seq_id], MAX_TEXT_TOKENS

    def forget(self, view: SequenceView) -> None:
        """Take the finished output into the pool."""
        self._matched.pop(view.seq_id, None)
        self._pooled.discard(view.seq_id)
        if self._texts.pop(view.seq_id, None) is None or not self._pools_for(view):
            return
        key = view.request.salt, view.request.adapter
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = self._index(self._lengths, POOL_TOKENS, self._max_documents)
            if len(self._pools) > MAX_POOLS:
                self._pools.popitem(last=False)
        self._pools.move_to_end(key)
        pool.extend(list(view.token_ids[len(view.request.prompt_ids) :]))
        pool.close()

    def _pools_for(self, view: SequenceView) -> bool:
        """Tell whether the sequence drafts from a pool, and gives its output to it."""
        asked = view.request.params.speculation
        return self._max_documents > 0 and (asked is None or asked.pool)


def _evidence(num_matched: int, agreement: float, *, pooled: bool) -> int:
    length = min(num_matched.bit_length(), NUM_LENGTHS) - 1
    return (length * 3 + (agreement > 0.6) + (agreement == 1.0)) * 2 + (not pooled)
