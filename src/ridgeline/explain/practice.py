"""Ask about inference: a question for each explorer, whose answers, also those of common slips, it computes."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ridgeline.explain import explorers
from ridgeline.explain.exploration import Figure


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds an answer, and why it is right, or the slip that leads to it."""

    figure: Figure
    is_right: bool
    why: str


@dataclass(frozen=True, slots=True)
class Question:
    """Holds a question, and its answers from the least to the largest."""

    explorer: str
    ask: str
    answers: Sequence[Answer]


def questions() -> Sequence[Question]:
    """Return the question of each explorer, with its answers computed."""
    asked = tomllib.loads((resources.files(explorers) / "practice.toml").read_text(encoding="utf-8"))
    return [_question(name, **text) for name, text in asked.items()]


def _question(
    name: str, ask: str, figure: str, slips: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any] | None = None
) -> Question:
    def found(of: str, given: Mapping[str, Any]) -> Figure:
        return next(each for each in explorers.explore(name, **given).figures if each.name == of)

    right = found(figure, inputs or {})
    answers = [Answer(right, True, right.formula)]
    for slip in slips:
        changed = {key: value for key, value in slip.items() if key not in ("of", "slip")}
        answers.append(Answer(found(slip.get("of", figure), changed or inputs or {}), False, slip["slip"]))
    return Question(name, ask, sorted(answers, key=lambda answer: answer.figure.value or 0))
