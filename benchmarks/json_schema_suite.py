"""Compile every schema of the JSON-Schema test suite, and of others: valid outputs or a named refusal, never a hang.

Usage: python -m benchmarks.json_schema_suite FOLDER [FOLDER ...]: folders of JSON files, as those of
https://github.com/json-schema-org/JSON-Schema-Test-Suite, lists of groups with a `schema` and `tests`. Where a schema
compiles, each test's data is checked: what the suite calls valid or not, and what the grammar takes. Exit status 1
where something is neither compiled nor refused with a reason, or a grammar takes data that the suite calls invalid.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.core.errors import RequestError
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.text.grammar import Grammar, GrammarCompiler
from ridgeline.weights.folder import ModelFolder

TIMEOUT_S = 2.0


@dataclass
class Found:
    """What came of the schemas: counts, the reasons of refusals, and data that a grammar takes and must not."""

    counts: Counter[str] = field(default_factory=Counter[str])
    refusals: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    slowest_s: float = 0.0


def groups(folder: Path) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Yield name, schema and tests of every group below a folder."""
    for path in sorted(folder.rglob("*.json")):
        for group in json.loads(path.read_text("utf-8")):
            yield f"{path.name}: {group['description']}", group["schema"], group["tests"]


def takes(compiler: GrammarCompiler, grammar: Grammar, data: object) -> bool:
    """Tell whether an output may be this value, as json.dumps spells it."""
    matcher = grammar.matcher.deep_copy()
    ids = compiler._tokenizer.encode(json.dumps(data, ensure_ascii=False), add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def check(compiler: GrammarCompiler, found: Found, name: str, schema: object, tests: list[dict[str, Any]]) -> None:
    """Compile one schema, and try its data."""
    began_s = time.monotonic()
    try:
        grammar = compiler.compile(StructuredOutputsParams(json=schema))  # pyright: ignore[reportArgumentType]
    except RequestError as error:
        found.counts["refused"] += 1
        found.refusals[str(error).partition(": ")[2][:60]] += 1
        if not str(error).startswith("json") or error.param != "json":
            found.wrong.append(f"{name}: refused without a name: {error}")
        return
    finally:
        found.slowest_s = max(found.slowest_s, time.monotonic() - began_s)
    found.counts["compiled"] += 1
    for test in tests:
        taken = takes(compiler, grammar, test["data"])
        found.counts[f"{'valid' if test['valid'] else 'invalid'} data {'taken' if taken else 'not taken'}"] += 1
        if taken and not test["valid"]:
            found.wrong.append(f"{name}: {test['description']}")


def run(folders: list[Path]) -> Found:
    """Check all schemas below the folders."""
    tokenizer = ModelFolder.open("python-1m").tokenizer()
    assert tokenizer is not None
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, frozenset({0}), TIMEOUT_S)
    found = Found()
    for folder in folders:
        for group in groups(folder):
            check(compiler, found, *group)
    return found


def main() -> int:
    """Print what came of it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    found = run(parser.parse_args().folders)
    for what, count in sorted(found.counts.items()):
        print(f"{count:6} {what}")
    print(f"slowest: {found.slowest_s:.2f} s")
    for reason, count in found.refusals.most_common(30):
        print(f"{count:6} refused: {reason}")
    for each in found.wrong:
        print(f"wrong: {each}")
    return bool(found.wrong)


if __name__ == "__main__":
    sys.exit(main())
