"""Strategies that draft, for tests: a span's optional tail is a guess, and rows decide how much of it was right."""

import random
from dataclasses import replace

from ridgeline.core.step import Span
from ridgeline.decoding.proposers import Draft
from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.decoding.strategies.speculative import Speculative
from ridgeline.decoding.strategy import Accepted, sample_row
from ridgeline.decoding.trees import tree_of

# Engine options of small models: chunks, preemption and full batches come soon, and rows are alike in every batch.
TINY = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 16,
    "num_threads": 1,
    "deterministic": True,
    "block_size": 4,
    "max_num_batched_tokens": 24,
}


def drafter_of(llm):
    """The drafter of an engine that drafts with a model or a head."""
    return llm.engine.loop.scheduler.strategy._model.drafter


def prompts_of(model, count=3):
    """Random prompts of nine tokens for one of `tiny_models`."""
    return [row.tolist() for row in model.prompt(9, batch=count)]


class Drafting(Autoregressive):
    """Verifies what `draft(view, max_tokens)` guesses: a token counts if the row before it drew it."""

    rolls_back = True
    one_token = False

    def draft(self, view, max_tokens):
        raise NotImplementedError

    def next_span(self, view, max_tokens, *, score_all):
        span = super().next_span(view, max_tokens, score_all=score_all)
        known, num_output = len(view.token_ids), len(view.token_ids) - len(view.request.prompt_ids)
        room = min(max_tokens - span.num_tokens, view.request.max_tokens - num_output - 1)
        if span.end < known or score_all or room <= 0 or not num_output:
            return span
        guess = list(self.draft(view, room))[:room]
        return span._replace(
            token_ids=[*span.token_ids, *guess], num_logit_rows=1 + len(guess), num_optional=len(guess)
        )

    def rows(self, view, span: Span, first_row):
        known = len(view.token_ids)
        if span.end < known:
            return ()
        first = sample_row(view, first_row + span.num_logit_rows - 1 - span.num_optional)
        if not span.num_optional:
            return (first,)
        guess = list(span.token_ids[known - span.start :])
        history = [*first.output_ids] if view.request.params.needs_history else ()
        return [
            first._replace(
                row=first.row + i,
                num_output=first.num_output + i,
                output_ids=[*history, *guess[:i]] if view.request.params.needs_history else (),
                stop_ids=tuple(view.request.stop_ids) if first.num_output + i < view.request.params.min_tokens else (),
            )
            for i in range(1 + len(guess))
        ]

    def accept(self, view, span, sampled):
        known = len(view.token_ids)
        guess = list(span.token_ids[known - span.start :])
        right = 0
        while right < len(guess) and sampled[right].token_id == guess[right]:
            right += 1
        right = self.num_accepted(right)
        return Accepted(sampled[: right + 1], known - span.start + right)

    def num_accepted(self, right):
        """How many of the right guesses are taken; any number is correct."""
        return right


class Oracle:
    """Proposer that knows what comes and is often right: any number of tokens, one of them wrong as often as not.

    `known` has outputs by prompt and seed, as `Known.of` finds them; what is drafted is a function of the place alone.
    """

    def __init__(self, known, vocab_size, right=0.6):
        self.known, self.vocab_size, self.right = known, vocab_size, right

    def propose(self, view, max_tokens):
        prompt = len(view.request.prompt_ids)
        num_output = len(view.token_ids) - prompt
        place = random.Random(f"{num_output} {Known.key(view)}")
        text = [*self.known.of(view), *range(1, 9)]  # drafts go on behind every end
        tokens = text[num_output : num_output + place.randint(0, max_tokens)]
        if tokens and place.random() > self.right:
            wrong = place.randrange(len(tokens))
            tokens[wrong] = (tokens[wrong] + place.randint(1, self.vocab_size - 1)) % self.vocab_size
        return Draft(tokens, 0) if tokens else None

    def forget(self, view):
        pass


class TreeOracle(Oracle):
    """Drafts trees: what comes, cut off or broken as often as not, and wrong ways that branch off from it anywhere."""

    def propose(self, view, max_tokens):
        right = super().propose(view, max_tokens)
        prompt = len(view.request.prompt_ids)
        num_output = len(view.token_ids) - prompt
        place = random.Random(f"tree {num_output} {Known.key(view)}")
        ways = [list(right.token_ids)] if right else []
        for _ in range(place.randint(0, 4)):
            stem = ways[0][: place.randint(0, len(ways[0]))] if ways else []
            ways.append([*stem, *(place.randrange(self.vocab_size) for _ in range(place.randint(1, 3)))])
        if not ways:
            return None
        place.shuffle(ways)
        token_ids, parents = tree_of(ways)
        return Draft(token_ids, 0, parents=parents).shortened(max_tokens)


class Known(Autoregressive):
    """Decodes as ever, and remembers every output by its prompt, its adapter and, where it matters, its seed."""

    def __init__(self):
        self.outputs = {}

    @staticmethod
    def key(view):
        seed = 0 if view.request.params.greedy else view.seed
        return tuple(view.request.prompt_ids), view.request.adapter, seed

    def of(self, view):
        return list(self.outputs.get(self.key(view), ()))

    def forget(self, view):
        self.outputs[self.key(view)] = list(view.token_ids[len(view.request.prompt_ids) :])


def known_outputs(llm, prompts, params, **options):
    """Outputs of an engine without drafts; and an oracle's, which go on beyond the end where the text does."""
    scheduler, known, beyond = llm.engine.loop.scheduler, Known(), Known()
    scheduler.strategy = known
    found = llm.generate(prompts, params, use_tqdm=False, **options)
    several = params if isinstance(params, list) else [params] * len(prompts)
    room = llm.engine.info.max_model_len - max(map(len, prompts))
    longer = [
        replace(p, ignore_eos=True, stop=(), stop_token_ids=(), max_tokens=min(p.max_tokens + 8, room)) for p in several
    ]
    scheduler.strategy = beyond
    llm.generate(prompts, longer, use_tqdm=False, **options)
    for key, tokens in known.outputs.items():
        if beyond.outputs.get(key, [])[: len(tokens)] == tokens:
            known.outputs[key] = beyond.outputs[key]
    return found, known


def verified(llm, known, max_draft_tokens=6, right=0.6, oracle=Oracle):
    """Let an engine verify the drafts of an oracle; returns the strategy."""
    vocab_size = llm.engine.spec.vocab_size
    strategy = Speculative({"oracle": oracle(known, vocab_size, right)}, max_draft_tokens, None, lambda: 0.0)
    llm.engine.loop.scheduler.strategy = strategy
    return strategy
