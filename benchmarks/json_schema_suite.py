"""Compile every schema of the JSON-Schema test suite, and of others: valid outputs or a named refusal, never a hang.

usage: python -m benchmarks.json_schema_suite [--outputs N] [--out DIR] FOLDER [FOLDER ...]: folders of JSON files, as
of https://github.com/json-schema-org/JSON-Schema-Test-Suite, lists of groups with a `schema` and `tests`, or as the
corpora of https://github.com/python-jsonschema/hypothesis-jsonschema, objects of schemas by name and lists of them.
Where a schema compiles, each test's data is checked: what the suite calls valid or not, and whether the grammar takes
it in one of its spellings (1 for 1.0, another order of keys). `--outputs` makes so many outputs of each schema as
well, at random among what the grammar allows, and has jsonschema check them. Exit status 1 where something is neither
compiled nor refused with a reason, or a grammar takes data that is invalid.
"""

import itertools
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, DecimalException
from pathlib import Path
from typing import Any

from benchmarks.common import option_parser, save

from ridgeline.bench.report import Report
from ridgeline.core.errors import RequestError
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.text.grammar import Grammar, GrammarCompiler
from ridgeline.text.grammar_trial import GrammarTrial
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import ModelFolder

TIMEOUT_S = 2.0
MAX_SPELLINGS = 200
MAX_TOKENS = 300  # of an output at random; one that has not ended then says nothing
EOS = 0


@dataclass
class Found:
    """What came of the schemas: counts, the reasons of refusals, and data that a grammar takes and must not."""

    counts: Counter[str] = field(default_factory=Counter[str])
    refusals: Counter[str] = field(default_factory=Counter[str])
    narrow: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])
    slowest_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteReport(Report):
    """What came of the schemas of each folder, by its name; so many outputs were made of each that compiled."""

    num_outputs: int
    folders: dict[str, Found]


class Checker:
    """Compiles schemas as a server does, for one tokenizer, and tries values."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        tokenizer = ModelFolder.open("python-1m").tokenizer()
        assert tokenizer is not None
        self.tokenizer: Tokenizer = tokenizer
        model = tokenizer, tokenizer.vocab_size, frozenset({EOS})
        self._trial, self._compiler = GrammarTrial(timeout_s, *model), GrammarCompiler(*model)
        self._texts = [tokenizer.decode([token_id]) for token_id in range(tokenizer.vocab_size)]

    def compiled(self, schema: Any) -> Grammar:
        """Return the grammar of a schema. Raises RequestError."""
        params = StructuredOutputsParams(json=schema)
        self._trial.require(params)
        return self._compiler.compile(params)

    def takes(self, grammar: Grammar, data: object) -> bool:
        """Tell whether an output may be this value, in any of its spellings."""
        for text in itertools.islice(spellings(data), MAX_SPELLINGS):
            matcher = grammar.matcher.deep_copy()
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            if matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting():
                return True
        return False

    def output(self, grammar: Grammar, draw: random.Random) -> str | None:
        """Return an output at random, which tends to close what is open; None for one that does not end."""
        state, ids = grammar.start(), list[int]()
        while len(ids) < MAX_TOKENS:
            words = state.mask()
            allowed = [at for at in range(self.tokenizer.vocab_size) if int(words[at // 64]) >> (at % 64) & 1]
            closing = [at for at in allowed if at == EOS or self._texts[at].strip() in ("}", "]", '"', '"}', '"]')]
            chosen = draw.choice(closing if closing and draw.random() < 0.4 else allowed)
            if chosen == EOS:
                return self.tokenizer.decode(ids)
            ids.append(chosen)
            if state.accept(chosen):
                return self.tokenizer.decode(ids)
        return None


def spellings(value: Any) -> Iterator[str]:
    """Yield texts of a JSON value: numbers in two ways, objects of up to four keys in every order."""
    if isinstance(value, dict):
        orders = itertools.permutations(value.items()) if len(value) <= 4 else [tuple(value.items())]
        for order in orders:
            for texts in itertools.product(*(list(itertools.islice(spellings(item), 8)) for _, item in order)):
                keys = (json.dumps(key, ensure_ascii=False) for key, _ in order)
                yield "{" + ", ".join(f"{key}: {text}" for key, text in zip(keys, texts, strict=True)) + "}"
    elif isinstance(value, list):
        for texts in itertools.product(*(list(itertools.islice(spellings(item), 8)) for item in value)):
            yield "[" + ", ".join(texts) + "]"
    else:
        yield json.dumps(value, ensure_ascii=False)
        if isinstance(value, float) and value.is_integer():
            yield str(int(value))
        elif isinstance(value, float):
            yield f"{value}0"


def groups(folder: Path) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Yield name, schema and tests of every group below a folder; there are none for schemas by name."""
    for path in sorted(folder.rglob("*.json")):
        content = json.loads(path.read_text("utf-8"))
        for group in content if isinstance(content, list) else [content]:
            if "tests" in group:
                yield f"{path.name}: {group['description']}", group["schema"], group["tests"]
            else:
                yield from ((f"{path.name}: {name}", schema, []) for name, schema in group.items())


def problem_of(schema: Any, text: str) -> str | None:
    """Return what jsonschema finds wrong with an output, in decimals as they are written; "" where it cannot tell."""
    from jsonschema import Draft202012Validator, exceptions, validators

    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    checker = validators.validator_for(exact, default=Draft202012Validator)
    try:
        errors = list(checker(exact).iter_errors(json.loads(text, parse_float=Decimal)))
    except (DecimalException, re.error, AttributeError, TypeError, exceptions._WrappedReferencingError):
        return ""
    return f"{text[:200]}: {errors[0].message[:200]}" if errors else None


def check(
    checker: Checker, found: Found, name: str, schema: Any, tests: Sequence[dict[str, Any]], num_outputs: int = 0
) -> None:
    """Compile one schema, and try its data."""
    began_s = time.monotonic()
    try:
        grammar = checker.compiled(schema)
    except RequestError as error:
        found.counts["refused"] += 1
        found.refusals[str(error).partition(": ")[2][:60]] += 1
        if not str(error).startswith("json cannot be followed: ") or error.param != "json":
            found.wrong.append(f"{name}: refused without a name: {error}")
        return
    finally:
        found.slowest_s = max(found.slowest_s, time.monotonic() - began_s)
    found.counts["compiled"] += 1
    for test in tests:
        taken = checker.takes(grammar, test["data"])
        found.counts[f"{'valid' if test['valid'] else 'invalid'} data {'taken' if taken else 'not taken'}"] += 1
        if taken and not test["valid"]:
            found.wrong.append(f"{name}: {test['description']}")
        if test["valid"] and not taken:
            found.narrow.append(f"{name}: {test['description']}: {json.dumps(test['data'])[:80]}")
    for seed in range(num_outputs):
        output = checker.output(grammar, random.Random(seed))
        problem = None if output is None else problem_of(schema, output)
        said = ", without an end" if output is None else ", not judged by jsonschema" if problem == "" else ""
        found.counts[f"outputs at random{said}"] += 1
        if problem:
            found.wrong.append(f"{name}: {problem}")


def run(folder: Path, num_outputs: int = 0) -> Found:
    """Check all schemas below a folder."""
    checker, found = Checker(), Found()
    for group in groups(folder):
        check(checker, found, *group, num_outputs=num_outputs)
    return found


def show(name: str, found: Found) -> None:
    print(f"{name}: the slowest took {found.slowest_s:.2f} s")
    for what, count in sorted(found.counts.items()):
        print(f"{count:6} {what}")
    for reason, count in found.refusals.most_common(40):
        print(f"{count:6} refused: {reason}")
    for each in found.narrow:
        print(f"narrow: {each}")
    for each in found.wrong:
        print(f"wrong: {each}")


def main() -> int:
    """Print what came of it; return the exit status."""
    parser = option_parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--outputs", type=int, default=0, help="outputs of each schema that jsonschema checks")
    options = parser.parse_args()
    found = {folder.name: run(folder, options.outputs) for folder in options.folders}
    for name, each in found.items():
        show(name, each)
    save(options.out, SuiteReport(name="json-schema-suite", num_outputs=options.outputs, folders=found))
    return any(each.wrong for each in found.values())


if __name__ == "__main__":
    sys.exit(main())
