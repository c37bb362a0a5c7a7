"""Trees of drafted tokens: made of ways that share their beginnings, and what a step decides of one.

A tree's tokens stand in the order in which `core/step.py:Span` has them: behind each its first child, and behind all
that follows from that the next one.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from ridgeline.core.step import Mask, SampledToken, SampleRow, Span
from ridgeline.decoding.strategy import row_after
from ridgeline.text.grammar import GrammarState

KNOWN = -1  # the parent of what follows the newest known token
_Trie = dict[int, "_Trie"]


def tree_of(ways: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return the tokens of `ways`, none of them empty, and the index of each one's parent, or KNOWN.

    What begins alike is there once, and no two siblings are alike.
    """
    root: _Trie = {}
    for way in ways:
        at = root
        for token_id in way:
            at = at.setdefault(token_id, {})
    token_ids, parents = list[int](), list[int]()
    left = [(*child, KNOWN) for child in reversed(root.items())]
    while left:
        token_id, behind, parent = left.pop()
        left += [(*child, len(parents)) for child in reversed(behind.items())]
        token_ids.append(token_id)
        parents.append(parent)
    return token_ids, parents


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
    tree, count = tuple([span.num_tokens + parent for parent in parents]), len(token_ids)
    behind = [*span.token_ids, *token_ids]
    return span._replace(token_ids=behind, num_logit_rows=1 + count, num_optional=count, parents=tree)


def fitting(span: Span, grammar: GrammarState) -> Span:
    """Return the span with as much of its tree as the grammar allows."""
    ways = [grammar.fitting([span.token_ids[i] for i in way]) for way in _ways(span)]
    return with_tree(span.required(), *tree_of([way for way in ways if way]))


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
