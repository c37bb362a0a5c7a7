"""Trees of drafted tokens: made of ways that share their beginnings, and what a step decides of one.

A tree's tokens stand in the order in which `core/step.py:Span` has them: behind each its first child, and behind all
that follows from that the next one.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from ridgeline.core.step import Mask, SampledToken, SampleRow, Span
from ridgeline.decoding.strategy import row_after
from ridgeline.text.grammar import GrammarState

KNOWN = -1  # the parent of what follows the newest known token


class Tree(NamedTuple):
    """Drafted tokens, the index of each one's parent or KNOWN, and where each of the ways that it was made of ends."""

    token_ids: Sequence[int]
    parents: Sequence[int]
    ends: Sequence[int]


def tree_of(ways: Sequence[Sequence[int]]) -> Tree:
    """Return the tree of `ways`, none of them empty: what begins alike is there once, and no two siblings are alike."""
    children: list[dict[int, int]] = [{}]  # by token; the first are those of the newest known one
    token_ids, ends = [0], list[int]()
    for way in ways:
        at = 0
        for token_id in way:
            if token_id not in children[at]:
                children[at][token_id] = len(children)
                children.append({})
                token_ids.append(token_id)
            at = children[at][token_id]
        ends.append(at)
    place, parents = {0: KNOWN}, list[int]()
    left = [(child, 0) for child in reversed(children[0].values())]
    while left:
        node, parent = left.pop()
        place[node] = len(parents)
        parents.append(place[parent])
        left += [(child, node) for child in reversed(children[node].values())]
    order = sorted(place, key=place.__getitem__)[1:]
    return Tree([token_ids[node] for node in order], parents, [place[end] for end in ends])


def best_ways(chances: Sequence[Sequence[float]], count: int) -> list[tuple[float, tuple[int, ...]]]:
    """Return the `count` likeliest ways of choosing one of the `chances` at each depth, as far as it goes.

    With the product of its chances each, falling, so that a way stands behind those that it goes on from.
    """
    found: list[tuple[float, tuple[int, ...]]] = []
    left: list[tuple[float, tuple[int, ...]]] = [(-chances[0][0], (0,))]
    while left and len(found) < count:
        value, way = heappop(left)
        found.append((-value, way))
        *before, rank = way
        depth = len(before)
        if rank + 1 < len(chances[depth]) and chances[depth][rank]:
            heappush(left, (value / chances[depth][rank] * chances[depth][rank + 1], (*before, rank + 1)))
        if depth + 1 < len(chances):
            heappush(left, (value * chances[depth + 1][0], (*way, 0)))
    return found


def with_tree(span: Span, token_ids: Sequence[int], parents: Sequence[int]) -> Span:
    """Return a span that ends at the newest known token with a tree behind it."""
    known, count = span.num_tokens, len(token_ids)
    tree = tuple([known + parent for parent in parents])
    return span._replace(
        token_ids=[*span.token_ids, *token_ids],
        num_logit_rows=1 + count,
        num_optional=count,
        parents=() if tree == tuple(range(known - 1, known - 1 + count)) else tree,
    )


def fitting(span: Span, grammar: GrammarState) -> Span:
    """Return the span with as much of its tree as the grammar allows."""
    kept: set[int] = set()
    for way in _ways(span):
        kept.update(way[: len(grammar.fitting([span.token_ids[i] for i in way]))])
    return span.only(sorted(kept))


def tree_rows(span: Span, first: SampleRow, grammar: GrammarState | None) -> list[SampleRow]:
    """Return a row for the newest known token, of which `first` is one, and for each of the tree behind it."""
    known = span.num_tokens - span.num_optional
    masks: dict[int, Mask] = {}
    for way in _ways(span) if grammar is not None else ():
        found = grammar.masks([span.token_ids[i] for i in way]) if grammar is not None else []
        masks.update(zip((known - 1, *way), found, strict=True))
    drafted: list[list[int]] = [[]]
    for index, parent in enumerate(span.parents, known):
        drafted.append([*drafted[parent - known + 1], span.token_ids[index]])
    rows = enumerate(drafted)
    return [row_after(first, first.row + i, way)._replace(allowed=masks.get(known - 1 + i)) for i, way in rows]


def followed(span: Span, sampled: Sequence[SampledToken]) -> list[int]:
    """Return the indices of the drafted tokens that were sampled, one after the other: `sampled` has a token behind the
    newest known one and each of the draft."""
    newest = span.num_tokens - span.num_optional - 1
    tokens = [token.token_id if token.error is None else -1 for token in sampled]
    return span.way(lambda index, _: tokens[index - newest])


def _ways(span: Span) -> list[list[int]]:
    """Return the indices of the tree's tokens on the way to the end of each branch."""
    known = span.num_tokens - span.num_optional
    return [[i for i in (*b.way, *range(b.begin, b.end)) if i >= known] for b in span.branches()]
