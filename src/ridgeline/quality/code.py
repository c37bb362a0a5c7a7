"""Generated code: how often what a model writes for a function's head is Python at all. Nothing of it is ever run."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import dedent

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.params import SamplingParams
from ridgeline.engine.llm import LLM
from ridgeline.quality.texts import Texts

MAX_TOKENS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeComparison:
    """Functions that a model and its base completed, greedily, from signature and docstring, and which parse.

    `only_model` and `only_base` are the pairs of which one alone parses: what McNemar's test is about.
    """

    num_functions: int
    parsed: int
    base_parsed: int
    only_model: int
    only_base: int
    same_text: int


def compare_code(config: EngineConfig, base: EngineConfig, texts: Texts, count: int) -> CodeComparison:
    """Let both models complete the first `count` functions of the texts.

    Raises ConfigError where the texts have no function with a docstring.
    """
    llm = LLM.from_config(config)
    room = llm.engine.info.max_model_len - MAX_TOKENS
    found = [head for text in texts.by_name.values() for head in function_heads(text)]
    heads = [head for head in found if len(llm.engine.intake.encode(head)) <= room]
    heads = heads[:: max(1, len(heads) // count)][:count]
    if not heads:
        raise ConfigError(
            f"of {len(found)} Python functions with a docstring in the texts none fits the context; leave out --code"
        )
    written = _complete(llm, heads)
    by_base = _complete(LLM.from_config(base), heads)
    pairs = list(zip(map(parses, heads, written), map(parses, heads, by_base), strict=True))
    return CodeComparison(
        num_functions=len(heads),
        parsed=sum(own for own, _ in pairs),
        base_parsed=sum(other for _, other in pairs),
        only_model=sum(own and not other for own, other in pairs),
        only_base=sum(other and not own for own, other in pairs),
        same_text=sum(a == b for a, b in zip(written, by_base)),
    )


def function_heads(source: str) -> Iterator[str]:
    """Yield signature and docstring of every function that has both and a body; none of what is not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            yield dedent("".join(lines[node.lineno - 1 : node.body[0].end_lineno]))


def parses(head: str, completion: str) -> bool:
    """Tell whether a head and what was written for it are one function; a last line that was cut does not count."""
    body: list[str] = []
    for line in completion.splitlines(keepends=True):
        if not line.endswith("\n") or (line.strip() and not line[0].isspace()):
            break
        body.append(line)
    try:
        tree = ast.parse(head + "".join(body))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return isinstance(tree.body[0], ast.FunctionDef) and len(tree.body[0].body) > 1


def _complete(llm: LLM, heads: Sequence[str]) -> list[str]:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    return [output.outputs[0].text for output in llm.generate(list(heads), params, use_tqdm=False)]
