"""Ask a drafter, knowing how far its drafts can be trusted and whether it still works. Called by strategies."""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ridgeline.core.log import get_logger
from ridgeline.core.speculation import MAX_DRAFT
from ridgeline.core.step import Round, Rounds, Span, StepPlan, StepResult, Vectors
from ridgeline.decoding.acceptance import DEAR_TRUST
from ridgeline.decoding.draft_control import FEW, DraftControl
from ridgeline.decoding.drafters import Drafted, Drafter, DraftRequest, ListeningDrafter, RoundsDrafter, TreeDrafter
from ridgeline.decoding.lookups import Lookups
from ridgeline.decoding.proposers import Draft
from ridgeline.decoding.proposers.ngram import Ngram
from ridgeline.decoding.step_times import StepTimes
from ridgeline.decoding.strategy import SequenceView, num_left

MAX_UNSEEN, MAX_TOGETHER = 2048, 16  # rows of hidden states that wait to be taken in, and steps of one piece of them
TOLD_ALWAYS = 1  # sequences: a head is told of each step
LISTENING_STEPS = 32  # of more, before a look at what would be drafted
AGAIN_STEPS = 16  # behind a look and what was drafted, in which it is drafted, and again once plain steps are timed
MAX_ROUNDS, MAX_ROUNDS_S = 128, 0.04  # of one step, whose tokens come together
MAX_OF_ROUND = 8  # drafted tokens: the next round drafts the others
WITHIN_TOKENS = 256  # that rounds amid which drafts are looked up may bring, at least
MIN_LONGEST = 8  # tokens of a draft that is looked up there, of the longest matches
PLAIN_ROUND = 8  # from which one has no drafts, which says what a step without takes now, if there are twice as many
FIRST_ROUNDS, TRIAL_ROUNDS = 24, 64  # of a step whose drafts are of another length than any before, or are tried
FIRST_TAKES = 4.0  # steps without drafts: what a round takes, where that is not known yet
MAX_FAILURES = 3  # in a row, after which a drafter is left alone for good
REPEATED, MAX_REPEATED = 4, 32  # last tokens that stood before: fewer say nothing, more say no more

log = get_logger("engine")


class Guess(NamedTuple):
    """A draft that may be made or shortened, by what says how far it can be trusted."""

    kind: tuple[str, int]
    num_tokens: int
    survival: Sequence[float] = ()  # of a tree's tokens, where that is known better than by its kind
    depth: int = 0  # of a tree that is verified whole or not at all


class ModelDrafts:
    """Asks `drafter`, called `method`, and leaves it alone where it fails.

    How far a draft is right is learnt by how far the text repeats itself, since small models are best at that.
    """

    def __init__(self, method: str, drafter: Drafter, max_itl_s: float = math.inf) -> None:
        self.method, self.drafter, self._max_itl_s = method, drafter, max_itl_s
        self._listener = drafter if isinstance(drafter, ListeningDrafter) else None
        self._listens = True  # to what comes of steps, and to their hidden states if it is one that does
        self._num_unheard = 0  # looks at drafts since the last one at what it would draft
        self._looks_of_one = 1  # of so many, with more than a few sequences
        self._num_behind = 0  # steps since such a look, or since it drafted
        self._tries = False  # whether the draft that is made next need not pay
        self.failures = 0  # in a row
        self._trees = drafter if isinstance(drafter, TreeDrafter) else None
        self._going_on = drafter if isinstance(drafter, RoundsDrafter) and drafter.goes_on else None
        self.round_s: float | None = None  # what one of the last step with drafts took
        self._repeats = Ngram(REPEATED, MAX_REPEATED)
        self._unseen = deque[tuple[StepPlan, list[Vectors]]]()  # hidden states of steps, each going on from the first
        self._num_unseen = 0  # rows of them
        self.is_behind = False  # whether these cannot wait until somebody is drafted for

    def observe(
        self,
        running: Sequence[SequenceView],
        plan: StepPlan,
        result: StepResult,
        seconds: float,
        num_idle: int = 0,
    ) -> None:
        """Keep a step's hidden states for `take_in`; of too many the latest. What was drafted cannot wait: what comes
        later does not tell how much of it was right. The last one of several rounds is looked at.

        Nobody looks at drafts in the next `num_idle` steps: of several sequences hidden states are told just before a
        look at what would be drafted from them."""
        count, self._num_behind = len(running), self._num_behind + 1
        is_near = num_idle <= LISTENING_STEPS and (self._num_behind < AGAIN_STEPS or self._hears(count))
        listens = is_near or count <= TOLD_ALWAYS
        if self._listener is not None and listens != self._listens:
            self._listener.listen(listens)
        self._listens = listens
        if not listens:
            self._num_behind = max(self._num_behind, AGAIN_STEPS)  # what `rests` leaves out is not counted
        if (taps_TW := result.taps_TW) is None and plan.token_ids and plan.rounds is None:
            return
        if not plan.token_ids and plan.spans[0].num_optional:
            self.round_s = result.drafted(seconds)[1]
        drafted = plan.rounds is None or len(plan.rounds.tables) > 0
        if result.further and drafted:
            plan = plan._replace(spans=[result.further[span.seq_id][-1][0] for span in plan.spans])
            self._went_on(running, plan.spans)
        if taps_TW is None:
            return
        if plan.rounds is not None and not drafted:
            spans, taps_TW = _in_a_row(plan.spans, result.further, taps_TW)
            plan = plan._replace(spans=spans)
        first, taps = self._unseen[-1] if self._unseen else (plan, list[Vectors]())
        if 0 < len(taps) < MAX_TOGETHER and plan.token_ids and plan.step == first.step + len(taps):
            taps.append(taps_TW)
        else:
            self._unseen.append((plan, [taps_TW]))
            self.is_behind = self.is_behind or (not plan.token_ids and any(span.num_optional for span in plan.spans))
        self._num_unseen += len(taps_TW)
        while self._num_unseen > MAX_UNSEEN and len(self._unseen) > 1:
            self._num_unseen -= sum(map(len, self._unseen.popleft()[1]))

    def rests(self, num_idle: int) -> bool:
        """Tell whether `observe` has nothing to do where nobody looks at drafts in the next `num_idle` steps."""
        return num_idle > LISTENING_STEPS and not self._listens

    def looks(self, control: DraftControl, num_decodes: int) -> bool:
        """Tell whether a look at drafts, which is taken now, is at what this one would draft too."""
        hears = self._hears(num_decodes)
        self._num_unheard, self._num_behind = (0, 0) if hears else (self._num_unheard + 1, self._num_behind)
        if self._listener is not None and num_decodes > FEW:
            self._looks_of_one = control.looks_of_one(num_decodes)
        return hears

    def _hears(self, num_decodes: int) -> bool:
        """Tell whether the next look is at what this one would draft, who is told of the steps before it."""
        return num_decodes <= FEW or self._num_unheard + 1 >= self._looks_of_one

    def take_in(self, running: Sequence[SequenceView]) -> None:
        """Take in the hidden states of the steps that have landed."""
        unseen, self._unseen, self._num_unseen, self.is_behind = self._unseen, deque(), 0, False
        try:
            for plan, taps in unseen if self.failures < MAX_FAILURES else ():
                self.drafter.observe(running, plan, taps)
        except Exception:
            self.failures = MAX_FAILURES
            log.exception("hidden states could not be taken in, and what drafts from them is left alone")

    def lag(self, asked: Sequence[DraftRequest], running: Sequence[SequenceView]) -> int:
        """Take in all that has landed, and return by how many tokens the drafter lags behind those of `asked`."""
        self.take_in(running)
        return sum(self.drafter.lag(request.view) for request in asked)

    def most(self, view: SequenceView, room: int) -> int:
        """Return how many tokens a draft may have that has room for so many."""
        most = room if self._going_on is None else min(room, MAX_OF_ROUND)
        return 0 if self.failures >= MAX_FAILURES else min(most, self.drafter.max_tokens(view))

    def guess(
        self, view: SequenceView, most: int, control: DraftControl | None, num_decodes: int, lookups: Lookups | None
    ) -> Guess:
        """Return what a draft of at most so many tokens may be, with what it is worth to `control`; where `lookups`
        draft what repeats itself, it is learnt by what does not."""
        if self._trees is not None:
            guess = Guess((self.method, 0), most, self._trees.survival(view, most))
        else:
            repeated = self._repeats.propose(view, 1) if self._within(lookups, num_decodes) is None else None
            guess = Guess(self.kind(0 if repeated is None else repeated.evidence + REPEATED), most)
        if control is None:
            return guess
        of_sequence = view.seq_id, guess.kind, guess.num_tokens, DEAR_TRUST
        survival = guess.survival or control.acceptance.survival(*of_sequence)
        rest = view.request.max_tokens - len(view.token_ids) + len(view.request.prompt_ids)
        worth = control.worth(self.drafter.lag(view), num_decodes, rest)
        return guess._replace(survival=[worth * chance for chance in survival])

    def draft(self, asked: Sequence[DraftRequest], max_catch_up: int) -> Mapping[int, Drafted]:
        """Return the drafter's drafts; none where it fails: sequences then go on without."""
        self._num_behind = 0
        try:
            drafts = self.drafter.draft(asked, max_catch_up)
        except Exception:
            self.failures += 1
            ends = ", and it is left alone" if self.failures == MAX_FAILURES else ""
            log.exception("%d sequences go on without drafts, which could not be made%s", len(asked), ends)
            for request in asked:
                self.drafter.forget(request.view)
            return {}
        self.failures = 0
        return drafts

    def kind(self, num_matched: int) -> tuple[str, int]:
        """Return what the acceptance of a draft behind so many tokens that stood before is learnt by."""
        return self.method, (num_matched // REPEATED).bit_length()

    def looks_up(
        self,
        view: SequenceView,
        draft: Draft,
        guess: Guess | None,
        lookups: Lookups | None,
        control: DraftControl | None,
    ) -> bool:
        """Tell whether rounds that begin with what is guessed for the only sequence look up by themselves what was
        found for it."""
        lookups = self._within(lookups, 1)
        if guess is None or lookups is None or control is None or draft.method != lookups.method:
            return False
        return lookups.proposer.is_own(view) and control.best(1, guess.survival, computed=True) > 0

    def _within(self, lookups: Lookups | None, num_decodes: int) -> Lookups | None:
        """Return the lookups if they draft amid rounds of the model."""
        return lookups if self._going_on is not None and num_decodes == 1 else None

    def rounds(
        self,
        asked: Sequence[DraftRequest],
        guesses: Mapping[int, Guess],
        lookups: Lookups | None,
        control: DraftControl | None,
    ) -> Rounds | None:
        """Return how a step goes on that verifies drafts of so many tokens, of all that run, as they were just made.

        None: it ends. It does so too where `lookups` may gain more than what is guessed, unless it verifies these.
        """
        if self._going_on is None:
            return None
        count, times = len(asked), None if control is None else control.times
        most = most_rounds(asked, self.round_s, times, self._max_itl_s)
        num_drafted, tries, self._tries = sum(each.num_tokens for each in asked), self._tries, False
        most = min(most, TRIAL_ROUNDS) if tries else most
        if times is not None and not times.knows(count, num_drafted, computed=True):
            most = min(most, FIRST_ROUNDS)  # they tell what one takes
        try:
            least_room = WITHIN_TOKENS if control and self._within(lookups, count) else 0
            rounds = self._going_on.rounds(asked, most, least_room) if most > 1 else None
            if rounds is not None and control is not None and count == 1 and most >= 2 * PLAIN_ROUND:
                rounds = rounds._replace(plain_round=PLAIN_ROUND)
            watched = rounds and _watched(rounds, asked, guesses, lookups, control)
            return watched and watched._replace(max_s=min(watched.max_s, self._max_itl_s))
        except Exception:
            self.failures += 1
            log.exception("a step that verifies drafts does not go on by itself")
            return None

    def _went_on(self, running: Sequence[SequenceView], last: Sequence[Span]) -> None:
        """Take in where the drafter is behind several rounds, the last ones being of these spans."""
        views = {view.seq_id: view for view in running}
        for span in last:
            if (view := views.get(span.seq_id)) is not None and self._going_on is not None:
                try:
                    self._going_on.went_on(view, span)
                except Exception:
                    log.exception("rounds could not be taken in")
                    self.drafter.forget(view)

    def lengthen(self, asked: list[DraftRequest], most: Mapping[int, DraftRequest]) -> None:
        """Ask for one token more: of the first that may have one, or of who lags least where none is asked."""
        for index, request in enumerate(asked):
            if request.num_tokens < most[request.view.seq_id].num_tokens:
                asked[index] = request._replace(num_tokens=request.num_tokens + 1)
                return
        if not asked:
            self._tries = True
            asked.append(min(most.values(), key=lambda each: self.drafter.lag(each.view))._replace(num_tokens=1))

    def forget(self, view: SequenceView) -> None:
        """Forget the sequence: it has ended."""
        self._repeats.forget(view)
        self.drafter.forget(view)


def _in_a_row(
    spans: Sequence[Span], further: Mapping[int, Sequence[Round]], taps_TW: Vectors
) -> tuple[list[Span], Vectors]:
    """Return each sequence's tokens of several rounds as one span, without those that were wrong, and their taps; the
    last round's are all there."""
    num_tokens, begins = sum(span.num_tokens for span in spans), 0
    found, rows = list[Span](), list[int]()
    for span in spans:
        each, token_ids = [span, *[behind for behind, _ in further.get(span.seq_id, ())]], list[int]()
        for index, (one, end) in enumerate(zip(each, [*[one.start for one in each[1:]], each[-1].end])):
            token_ids += one.token_ids[: end - one.start]
            rows += range(first := index * num_tokens + begins, first + end - one.start)
        found.append(span._replace(token_ids=token_ids))
        begins += span.num_tokens
    return found, taps_TW[rows]


def most_rounds(asked: Sequence[DraftRequest], round_s: float | None, times: StepTimes | None, max_itl_s: float) -> int:
    """Return how many rounds a step may have that verifies drafts of so many tokens, one of which takes `round_s`: no
    more than fit between two tokens, if that is bound."""
    max_s = min(MAX_ROUNDS_S, max_itl_s)
    if round_s is None:
        is_known = times is not None and times.knows(len(asked), 0)
        round_s = FIRST_TAKES * times.plain_s(len(asked)) if times is not None and is_known else max_s
    within = int(max_s / max(round_s, max_s / MAX_ROUNDS))
    return min(within, *(2 * num_left(view) // (1 + num_tokens) for view, num_tokens, _ in asked))


def method_of_rounds(draft: Draft | None, rules: Collection[str]) -> str:
    """Return what drafted, where its tokens are verified one after the other and each alone; empty elsewhere."""
    return "" if not draft or draft.parents or (draft.weights and "block" in rules) else draft.method


def gains_more(
    control: DraftControl | None,
    view: SequenceView,
    guess: Guess,
    computed: Guess | None,
    num_decodes: int,
    *,
    amid: bool = False,
    within: bool = False,
) -> bool:
    """Tell whether a draft that is there gains more than one that a model computes, if any, with what both take; `amid`
    rounds of the model, or `within` them."""
    if control is None or computed is None:
        return True
    if control.acceptance.is_new(guess.kind) and (amid or not control.acceptance.is_new(computed.kind)):
        return within  # else it is compared with what comes, for nothing
    survival = guess.survival or control.acceptance.survival(view.seq_id, guess.kind, guess.num_tokens)
    return control.pays_instead(num_decodes, survival, computed.survival, amid=amid, within=within)


def _watched(
    rounds: Rounds,
    asked: Sequence[DraftRequest],
    guesses: Mapping[int, Guess],
    lookups: Lookups | None,
    control: DraftControl | None,
) -> Rounds:
    """Return rounds that verify what is looked up where that gains more in a text than what is guessed, or, of several
    texts, end there."""
    if control is None or lookups is None:
        return rounds
    found, within = list[tuple[object, int]](), len(asked) == 1
    for view, *_ in asked:

        def gains(evidence: int, num_tokens: int, view: SequenceView = view) -> bool:
            if within and evidence < lookups.proposer.evidence(REPEATED):
                return False
            guess = Guess((lookups.method, evidence), num_tokens)
            return gains_more(control, view, guess, guesses[view.seq_id], len(asked), amid=True, within=within)

        found.append(lookups.proposer.watched(view, MAX_DRAFT, gains, ends=not within))
    matched = [num_matched for _, num_matched in found]
    rounds = rounds._replace(texts=[text for text, _ in found], min_matched=matched)
    if not within:
        return rounds
    survival = control.acceptance.survival(asked[0].view.seq_id, lookups.kind(MAX_DRAFT), MAX_DRAFT)
    longest = max(control.best(1, survival), MIN_LONGEST)
    return rounds._replace(longest=longest, limits=lookups.proposer.limits, max_s=MAX_ROUNDS_S)


def lengths_of(
    guesses: Mapping[int, Guess], control: DraftControl | None, method: str | None, num_decodes: int, budget: int
) -> dict[int, int]:
    """Return how many tokens of each guess pay and fit into `budget` tokens, by sequence, where there are any.

    `method` is that of a model.
    """
    if control is not None:
        acceptance = control.acceptance
        survivals = [g.survival or acceptance.survival(key, g.kind, g.num_tokens) for key, g in guesses.items()]
        for index, guess in enumerate(guesses.values()):
            if guess.depth:
                mean = sum(survivals[index][: guess.depth]) / guess.num_tokens
                survivals[index] = [mean] * guess.num_tokens
        computed = any(guess.kind[0] == method for guess in guesses.values())
        wanted = control.choose(num_decodes, survivals, budget, computed=computed)
        wanted = [g.num_tokens if g.depth and n else n for g, n in zip(guesses.values(), wanted, strict=True)]
    else:
        wanted = [guess.num_tokens for guess in guesses.values()]
    lengths: dict[int, int] = {}
    for seq_id, length in zip(guesses, wanted, strict=True):
        if (length := min(length, budget)) > 0:
            lengths[seq_id] = length
            budget -= length
    return lengths
