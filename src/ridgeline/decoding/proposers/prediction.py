"""Follows the text that the client expects, a request's `prediction`: an edited file is mostly the file.

Where the output leaves the text, the place to go on is looked for by the last output tokens, nearest to where it was
left; until there is one, each token of the output is taken to stand for one of the text. So a changed word costs one
rejected draft.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.core.speculation import SpeculationConfig
from ridgeline.decoding.proposers import Draft
from ridgeline.decoding.strategy import SequenceView

MAX_CANDIDATES = 64  # places that are compared: bounds the search in a text of one repeated token
MAX_MATCH = 8  # tokens; a longer match is not more certain
NEAR = 32  # tokens, within which one matching token is enough


def build(config: SpeculationConfig) -> "Prediction":
    return Prediction()


@dataclass(slots=True)
class _Place:
    """Where an output of `num_read` tokens stands: before token `at` of the text, of which the last `matched` agree.

    `places` are those of each token in the text, made when one is looked for first.
    """

    at: int = 0
    matched: int = 0
    num_read: int = 0
    places: dict[int, list[int]] = field(default_factory=dict[int, list[int]])


class Prediction:
    """Proposes what follows in `view.request.prediction_ids`; nothing for sequences without."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}

    def propose(self, view: SequenceView, max_tokens: int) -> Draft | None:
        text = view.request.prediction_ids
        if not text:
            return None
        place = self._places.get(view.seq_id)
        if place is None:
            place = self._places[view.seq_id] = _Place()
        tokens, num_prompt = view.token_ids, len(view.request.prompt_ids)
        for token in tokens[num_prompt + place.num_read :]:
            place.num_read += 1
            place.matched = place.matched + 1 if place.at < len(text) and text[place.at] == token else 0
            place.at += 1
            if not place.matched:
                output = tokens[max(num_prompt, num_prompt + place.num_read - MAX_MATCH) : num_prompt + place.num_read]
                _find(place, text, output)
        following = text[place.at : place.at + max_tokens]
        return Draft(following, min(place.matched.bit_length(), 4)) if following else None

    def forget(self, view: SequenceView) -> None:
        self._places.pop(view.seq_id, None)


def _find(place: _Place, text: Sequence[int], output: Sequence[int]) -> None:
    """Move to the place in the text behind the longest match of the output's last tokens, the nearest among equals."""
    if not place.places:
        for position, token in enumerate(text):
            place.places.setdefault(token, []).append(position)
    candidates = place.places.get(output[-1], ())
    middle = bisect_left(candidates, place.at)
    best, here = (1, -NEAR), place.at  # tokens that match, and less the distance
    for position in candidates[max(middle - MAX_CANDIDATES // 2, 0) : middle + MAX_CANDIDATES // 2]:
        length = 1
        while length < min(len(output), position + 1) and text[position - length] == output[-1 - length]:
            length += 1
        if (found := (length, -abs(position + 1 - here))) >= best:
            best, place.at, place.matched = found, position + 1, length
