"""Speculative decoding: a step computes the next token and a draft of those behind it, and keeps what was right.

The draft is the optional tail of a span. Every row samples with the random number of its own position, as without
drafts, and a drafted token counts if the row before it sampled that very token (rule `match`; drafter-invariant
speculation, arXiv 2408.07978). So the output is a function of model, prompt and seed alone:

    known     a b c | drafted  d e f        rows sample  d e x y        gained  d e x      final  a b c d e
"""

import math
from collections.abc import Collection, Mapping, Sequence

from ridgeline.core.clock import Clock
from ridgeline.core.config import EngineConfig
from ridgeline.core.speculation import proposer_names
from ridgeline.core.step import NO_TOKEN, DraftStats, Rounds, SampledToken, SampleRow, Span, StepPlan, StepResult
from ridgeline.decoding.draft_control import FEW, MANY, WINDOW_STEPS, DraftControl
from ridgeline.decoding.drafters import Companion, Drafter, DraftRequest, build_drafter
from ridgeline.decoding.lookups import lookups_of
from ridgeline.decoding.model_drafts import Guess, ModelDrafts, gains_more, lengths_of, method_of_rounds, most_rounds
from ridgeline.decoding.proposers import Draft, Observer, Proposer, RoundsProposer, build_proposer
from ridgeline.decoding.rejection import drafted_rows, with_typical
from ridgeline.decoding.step_window import StepWindow
from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.decoding.strategy import Accepted, Room, SequenceView, num_left, room_for_drafts, sample_row
from ridgeline.decoding.trees import fitting, followed, tree_rows, with_tree
from ridgeline.decoding.unverified import Unverified
from ridgeline.spec.spec import DecoderSpec

FORCED = "forced"  # the proposer that is always right, where it has a guess
ON_REQUEST = "prediction"  # the proposer that is there also with speculation off, for requests that bring its text
GROWING_ROUNDS = 2  # of a lookup that found no more than it drafts: behind what was right more is found
PROBE_ROUNDS = 12  # between two in which a drafter drafts one token more than pays


def build(
    spec: DecoderSpec,
    config: EngineConfig,
    clock: Clock,
    companion: Companion | None = None,
    *,
    logged: bool = False,
    goes_on: bool = False,
) -> "Speculative":
    """Build the strategy; `companion` is a drafter's model. Behind recurrent states, drafted tokens are `logged`."""
    given = config.speculation
    control = DraftControl() if given.adaptive_speculation else None
    names = dict.fromkeys(sorted((ON_REQUEST, *given.proposers()), key=FORCED.__ne__))  # that one first
    hosts, drafter = {name: build_proposer(name, given) for name in names if name in proposer_names()}, None
    if given.drafter is not None:
        assert companion is not None, f"{given.drafter} drafts with a model"
        drafter = given.drafter[0], build_drafter(given.drafter[0], companion)
    asked: list[str] = [given.rejection_sample_method]
    asked += ["reject"] if given.draft_sample_method == "probabilistic" else []
    rules = () if config.backend.deterministic else asked
    most, itl_s = given.max_draft_tokens(logged=logged), config.scheduler.max_itl_s or math.inf
    return Speculative(hosts, most, control, clock, drafter, rules=rules, goes_on=goes_on, max_itl_s=itl_s)


class Speculative(Autoregressive):
    """Strategy that verifies what `proposers`, by their names, draft: for each sequence the draft that gains most.

    What a draft gains is what `control` has learnt of its kind; without it the first proposer with a guess is taken.
    The `drafter`, with its name, drafts for the sequences of which nobody has a guess. What a request's own random
    numbers do not decide, as it has no seed, is verified by `rules` of `decoding/rejection.py`: `reject` and `block`
    for the drafter's tokens, `typical` for all.

    At most `max_draft_tokens` a sequence and step; with `control` as many of them as raise the throughput, without all.
    `clock` gives monotonic seconds: a step's time is that from its plan on, with what a drafter computes.
    Where it `goes_on` with further rounds, all of them take about `max_itl_s` at most.
    """

    rolls_back = True

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        max_draft_tokens: int,
        control: DraftControl | None,
        clock: Clock,
        drafter: tuple[str, Drafter] | None = None,
        *,
        rules: Collection[str] = (),
        goes_on: bool = False,
        max_itl_s: float = math.inf,
    ) -> None:
        self._proposers = proposers
        self._observers = {name: each for name, each in proposers.items() if isinstance(each, Observer)}
        self._model = ModelDrafts(*drafter, max_itl_s) if drafter is not None else None
        self._lookups = None if drafter is None else lookups_of(proposers)
        self._rules, self._goes_on, self._max_itl_s = rules, goes_on, max_itl_s
        self._num_rounds = self._num_right = 0  # in which the drafter could draft; right tokens of this step's drafts
        self._control, self._clock, self._max_draft_tokens = control, clock, max_draft_tokens
        self._drafts: dict[int, Draft] = {}  # of this step, by sequence
        self._unverified = Unverified()
        self._stats = {name: DraftStats() for name in (*proposers, *([drafter[0]] if drafter else []))}
        self._always = drafter is not None or any(name != ON_REQUEST for name in proposers)
        self._running: Sequence[SequenceView] = ()  # as it was given last
        self._some_ask = False  # whether one of these is drafted for
        self._going_on: Rounds | None = None  # how this step goes on by itself
        self._landed_rounds, self._plain_s = 1, 0.0  # of the last step, and the one of them that verified nothing
        self._round_s: float | None = None  # what one of the last step with drafts took
        self._window = StepWindow()  # steps of which the control was not told
        self._asking_s: float | None = None  # of this step, where drafts were asked for
        self._num_peeks = self._num_unseen = 0  # drafts that were looked at, and steps since the last of these
        self._num_rested, self._tries = 0, False  # steps since the drafter drafted; whether it drafts to be learnt of
        self._idle = self._idle_steps = self._num_sure = 0  # steps without decisions: left, of how many; no look behind
        self._num_napped = 0  # of these, untimed ones
        self._behind = 0, 0.0  # tokens that it catches up with in this step, and what its first draft takes
        self._is_computed = False  # whether it drafts in this step

    @property
    def one_token(self) -> bool:
        """Whether nothing is drafted for the step that begins: it goes on as without drafts."""
        return not self._drafts

    def ahead(self, running: Sequence[SequenceView]) -> bool:
        rests = self._idle > 0 or (self._control is not None and self._control.rests(len(running)))
        return not self._drafts and (rests or not self._any_asks(running))  # which `accept` still asks for

    def begin(self, running: Sequence[SequenceView], room: Room) -> None:
        """Ask for drafts of the sequences that decode, unless some still compute a prompt: that step is busy."""
        if self._model is not None and self._model.is_behind:
            self._model.take_in(running)
        if self._idle and running is self._running:  # whoever comes or goes ends it
            self._idle -= 1
            return
        window, control, count = self._window, self._control, len(running)
        if made := self._idle_steps - self._idle:
            self._num_unseen, self._num_rested = self._num_unseen + made, self._num_rested + made
            self._num_napped += 0 if window.num_begun else made
        self._idle = self._idle_steps = self._num_sure = 0
        self._drafts.clear()
        self._going_on = None
        if not self._any_asks(running):
            window.stop()
            return
        rests = control is not None and control.rests(count)  # who wakes now asks when what is in flight has landed
        if control is not None and rests and self._asking_s is None and window.num_begun:
            self._num_unseen, self._num_rested = self._num_unseen + 1, self._num_rested + 1
            num_sure = control.peek_steps(count) - self._num_unseen
            self._num_sure = 0 if control.goes_on else num_sure
            if num_sure <= 0 and window.num_landed > 2:  # the first may be in flight already
                self._peek(control, running, room_for_drafts(running, room))
            if window.num_landed < control.window_steps:
                return
        now_s = self._clock()
        was_plain = window.shape is not None and self._asking_s is None and window.num_landed >= WINDOW_STEPS
        if control is not None and window.shape is not None:
            lookup_s, rounds = self._lookups.tell(control, count) if self._lookups else 0.0, self._landed_rounds
            step_s = window.step_s(now_s) - lookup_s - self._plain_s
            num_steps = window.num_landed + (self._num_napped if was_plain else 0)
            asking_s = None if self._asking_s is None else self._asking_s / rounds
            control.paced(count, self._plain_s)
            taken = self._num_right / rounds, step_s / rounds, asking_s, num_steps * rounds
            control.step(*window.shape, *taken, *self._behind, computed=self._is_computed, round_s=self._round_s)
            self._num_napped = 0
        window.restart(now_s)
        self._tries = self._tries and (self._asking_s is None or self._num_right > 0)  # what is right is tried again
        self._asking_s, self._num_right, self._behind, self._landed_rounds = None, 0, (0, 0.0), 1
        self._is_computed, self._plain_s = False, 0.0
        if control is not None and control.rests(count):
            nap = control.peek_steps(count) - self._num_unseen - WINDOW_STEPS  # the next look comes with timed steps
            if (was_plain or (count > FEW and not control.goes_on)) and nap > 0 and control.times.knows(count, 0):
                window.stop()
            self._idle = self._idle_steps = control.window_steps // 2 if window.num_begun else nap
            self._num_sure = 0 if control.goes_on else nap - self._idle
        elif not rests and (budget := room_for_drafts(running, room)) > 0:
            self._draft(running, room.num_tokens, budget)

    def _peek(self, control: DraftControl, running: Sequence[SequenceView], budget: int) -> None:
        """Look at the draft of the next of the sequences: what it would be worth, and how its last one fared."""
        self._num_peeks, self._num_unseen, began_s = self._num_peeks + 1, 0, self._clock()
        view = running[self._num_peeks % len(running)]
        guess, model, count = None, self._model, len(running)
        draft, survival = self._propose(view)
        if draft is not None:
            self._unverified.add(view, draft)
            survival = survival or self._survival(control, view, draft)
        if model is not None and model.looks(control, count) and (most := model.most(view, self._room(view))) > 0:
            own = model.guess(view, most, control, count, self._lookups)
            if draft is None or not gains_more(control, view, Guess(draft.kind, len(survival), survival), own, count):
                guess, survival = own, own.survival
        lag = model.drafter.lag(view) if model is not None and guess is not None else None
        control.peek(view.seq_id, survival, len(running), budget, lag)
        if model is not None and guess is not None and control.rests(len(running)):
            self._tries = control.tries(count, self._num_rested, min(map(model.drafter.lag, running)), guess.kind)
        control.looked(self._clock() - began_s)

    def _draft(self, running: Sequence[SequenceView], max_catch_up: int, budget: int) -> None:
        """Make drafts for the step that begins, at most `budget` tokens."""
        began_s, drafts = self._clock(), dict[int, Draft]()
        unguessed, guesses = dict[int, DraftRequest](), dict[int, Guess]()
        control, count, model = self._control, len(running), self._model
        if model is not None and count < MANY:  # else once it is known that some are drafted for
            model.take_in(running)
        asked = running if control is None else [v for v in running if control.is_worth_asking(v.seq_id, count)]
        if self._tries and not asked and model is not None:  # of many sequences one tells as much as all
            able = [view for view in running if model.most(view, self._room(view)) > 0]
            asked = sorted(able, key=model.drafter.lag)[:1]
        for view in asked:
            draft, survival = self._propose(view)
            computed, num_tokens = None, 0 if model is None else model.most(view, self._room(view))
            if model is not None and num_tokens and (draft is None or control is not None):
                computed = model.guess(view, num_tokens, control, count, self._lookups)
            if draft is not None:
                guess = Guess(draft.kind, len(draft.token_ids), survival, draft.depth)
                gains = draft.method == FORCED or gains_more(control, view, guess, computed, count)
                ahead = model if count == 1 else None  # its rounds look up by themselves
                if gains and not (ahead and ahead.looks_up(view, draft, computed, self._lookups, control)):
                    drafts[view.seq_id], guesses[view.seq_id] = draft, guess
                    continue
                self._unverified.add(view, draft)
            if computed is not None:
                unguessed[view.seq_id] = DraftRequest(view, num_tokens, self._by_rule("reject", view))
                guesses[view.seq_id] = computed
        lengths = lengths_of(guesses, control, model and model.method, len(running), budget)
        for view in running:
            if (draft := drafts.get(view.seq_id)) is not None:
                if length := lengths.get(view.seq_id):
                    self._drafts[view.seq_id] = draft.shortened(length)
                else:
                    self._unverified.add(view, draft)
        self._asking_s = self._clock() - began_s
        if unguessed and model is not None:
            chosen = [r._replace(num_tokens=lengths[key]) for key, r in unguessed.items() if key in lengths]
            self._num_rounds += 1
            if (self._tries and not chosen) or (control and chosen and self._num_rounds % PROBE_ROUNDS == 0):
                model.lengthen(chosen, unguessed)  # nothing is learnt of no draft
            if chosen:
                lag, began_s = model.lag(chosen, running), self._clock()
                self._num_rested, self._is_computed, made = 0, True, model.draft(chosen, max_catch_up)
                self._behind = min(lag, max_catch_up), self._clock() - began_s
                for key, found in made.items():
                    kind = guesses[key].kind
                    self._drafts[key] = Draft(found.token_ids, kind[1], kind[0], found.weights, found.parents)
        self._going_on = self._rounds(running, guesses)

    def _rounds(self, running: Sequence[SequenceView], guesses: Mapping[int, Guess]) -> Rounds | None:
        """Return how the step goes on that verifies the drafts, where all of `running` have one by the same method."""
        drafts = [self._drafts.get(view.seq_id) for view in running]
        asked = [DraftRequest(v, len(d.token_ids), bool(d.weights)) for v, d in zip(running, drafts) if d]
        methods = {method_of_rounds(draft, self._rules) for draft in drafts}
        method, model = methods.pop() if len(methods) == 1 else "", self._model
        if not method or any(view.request.adapter or view.grammar is not None for view in running):
            return None
        if model is not None and model.method == method:
            return model.rounds(asked, guesses, self._lookups, self._control)
        times = None if self._control is None else self._control.times
        most, proposer = most_rounds(asked, self._round_s, times, self._max_itl_s), self._proposers.get(method)
        grows = any(guesses[v.seq_id].num_tokens == num < self._max_draft_tokens for v, num, _ in asked)
        most = min(most, GROWING_ROUNDS) if grows else most
        is_able = self._goes_on and most > 1
        lengths = [num_tokens for _, num_tokens, _ in asked]
        return proposer.rounds(running, most, lengths) if is_able and isinstance(proposer, RoundsProposer) else None

    def next_span(self, view: SequenceView, max_tokens: int, *, score_all: bool) -> Span | None:
        span = super().next_span(view, max_tokens, score_all=score_all)
        draft = self._drafts.get(view.seq_id)
        if span is None or draft is None or score_all or span.end < len(view.token_ids):
            return span
        if draft.parents:
            span = with_tree(span, draft.token_ids, draft.parents)
            span = span.shortened(min(max(span.num_tokens - max_tokens, 0), span.num_optional))
            return span if view.grammar is None else fitting(span, view.grammar)
        guess = draft.token_ids[: max_tokens - span.num_tokens]
        if view.grammar is not None:
            guess = view.grammar.fitting(guess)
        tokens, num_guessed = [*span.token_ids, *guess], len(guess)
        span = span._replace(token_ids=tokens, num_logit_rows=1 + num_guessed, num_optional=num_guessed)
        if self._going_on is None or num_guessed < len(draft.token_ids):
            return span
        room = next(room for other, room in zip(self._running, self._going_on.room) if other is view)
        return span._replace(num_further=room - span.num_tokens)

    def rounds(self, spans: Sequence[Span]) -> Rounds | None:
        return self._going_on if len(spans) == len(self._running) else None

    def rows(self, view: SequenceView, span: Span, first_row: int) -> Sequence[SampleRow]:
        if not span.num_optional:
            return super().rows(view, span, first_row)
        first, is_typical = sample_row(view, first_row), self._by_rule("typical", view)
        if span.parents:
            rows = tree_rows(span, first, view.grammar)
        else:
            weights = () if is_typical else self._drafts[view.seq_id].weights
            rows = drafted_rows(view, span, first, weights, in_block="block" in self._rules)
        return with_typical(span, rows) if is_typical else rows

    def accept(self, view: SequenceView, span: Span, sampled: Sequence[SampledToken]) -> Accepted:
        num_drafted = span.num_optional
        if not num_drafted:
            return Accepted(sampled, span.num_tokens)
        required, draft = span.num_tokens - num_drafted, self._drafts[view.seq_id]
        lookups, kind = self._lookups if span.matched > 0 else None, draft.kind
        if span.matched and (told := lookups or self._model) is not None:
            kind = told.kind(max(span.matched, -1 - span.matched))
        if observer := self._observers.get(draft.method):
            observer.observe(view, span, sampled)
        if span.parents:
            way = followed(span, sampled)
            right, gained = len(way), [sampled[0], *[sampled[index - required + 1] for index in way]]
            branch = sum(at.begin <= way[-1] for at in span.branches()) - 1 if way else 0
        else:
            guess, right, branch = span.token_ids[required:], 0, 0
            num_drafted -= list(guess).count(NO_TOKEN)
            while right < num_drafted and sampled[right].token_id == guess[right] and sampled[right].error is None:
                right += 1
            gained = sampled[: right + 1]
        if lookups is None:
            self._num_right += right
        else:
            lookups.accept(right)
        self._stats[kind[0]] = self._stats[kind[0]].with_draft(num_drafted, right)
        if self._control is not None:
            self._control.acceptance.observe(view.seq_id, kind, draft.depth or num_drafted, right)
        return Accepted(gained, required + right, kind[0], branch)

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Take in what a step of so many tokens takes, from steps without prompts."""
        if self._drafts:
            self._landed_rounds, self._round_s, self._plain_s = *result.drafted(seconds), result.plain_s
            if self._lookups is not None:
                self._lookups.land(result)
        if self._model is not None and not self._model.rests(num_idle := self._idle + self._num_sure):
            self._model.observe(self._running, plan, result, seconds, num_idle)
        if self._window.num_begun:
            decodes = plan.follows or all(span.num_logit_rows == span.num_tokens for span in plan.spans)
            shape = len(plan.spans), plan.num_tokens - len(plan.spans)
            self._window.land(shape if decodes else None, self._clock())

    def forget(self, view: SequenceView) -> None:
        self._unverified.forget(view)
        for proposer in self._proposers.values():
            proposer.forget(view)
        if self._model is not None:
            self._model.forget(view)
        if self._control is not None:
            self._control.forget(view.seq_id)

    def drafts(self) -> Mapping[str, DraftStats]:
        return dict(self._stats)

    def draft_gain(self) -> float | None:
        return self._control and self._control.gain

    def _propose(self, view: SequenceView) -> tuple[Draft | None, Sequence[float]]:
        """Return the draft that gains most, within what the output may still become, and its `_survival` if known."""
        if (room := self._room(view)) <= 0:
            return None, ()
        if self._control is not None:
            self._unverified.compare(view, self._control.acceptance)
        best, best_gain, best_survival = None, 0.0, list[float]()
        for name, proposer in self._proposers.items():
            if (found := proposer.propose(view, room)) is None:
                continue
            draft = found._replace(method=name)
            if self._control is None or len(self._proposers) == 1 or name == FORCED:
                return draft, ()
            survival = self._survival(self._control, view, draft)
            gain, worse = sum(survival), draft
            if gain > best_gain:
                worse, best, best_gain, best_survival = best, draft, gain, survival
            if worse is not None:
                self._unverified.add(view, worse)
        return best, best_survival

    def _survival(self, control: DraftControl, view: SequenceView, draft: Draft) -> list[float]:
        """Return, for each token of a draft, the chance that it and all before it are accepted."""
        return control.acceptance.survival(view.seq_id, draft.kind, draft.depth or len(draft.token_ids))

    def _any_asks(self, running: Sequence[SequenceView]) -> bool:
        """Tell whether one of `running` is drafted for."""
        if running is not self._running:
            self._running, self._some_ask = running, any(map(self._asks, running))
        return self._some_ask

    def _asks(self, view: SequenceView) -> bool:
        """Tell whether a sequence is drafted for at all."""
        asked = view.request.params.speculation
        return (self._always or bool(view.request.prediction_ids)) and (asked is None or asked.enabled)

    def _room(self, view: SequenceView) -> int:
        num_output = len(view.token_ids) - len(view.request.prompt_ids)
        if not num_output or not self._asks(view):  # before the first token the outputs of n > 1 are one sequence
            return 0
        asked = view.request.params.speculation
        most = asked.num_speculative_tokens if asked is not None else None
        rest = num_left(view) - 1
        return min(self._max_draft_tokens, rest, rest if most is None else most)

    def _by_rule(self, rule: str, view: SequenceView) -> bool:
        """Tell whether drafted tokens are verified by a rule: nobody can ask for the same output again.

        Not with a grammar: a draft is cut where it does not fit, so what is left of it is no longer from q.
        """
        params = view.request.params
        return rule in self._rules and params.seed is None and not params.greedy and view.grammar is None
