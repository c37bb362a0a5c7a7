"""The prompts: problems and library files to go on with, and Spec-Bench's questions through a chat template."""

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path

from ridgeline.engine.engine import Engine
from ridgeline.text.chat import ChatTemplate

DATA = Path(__file__).resolve().parents[3] / "shared/data/prompts"
MODULE_TOKENS = 256  # of a held-out file, before its continuation
SPEC_BENCH = {"translation": "translation", "summarization": "summarization", "qa": "qa", "math_reasoning": "math"}
SPEC_BENCH |= {"rag": "rag"}  # every other category is of MT-Bench, several turns
FAMILIES = (*SPEC_BENCH.values(), "multi_turn")
DOMAINS = ("humaneval", "modules", *FAMILIES)


def texts(domain: str, folder: Path) -> Iterator[str]:
    """Yield the prompts of a domain."""
    if domain == "humaneval":
        with gzip.open(folder / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
            yield from (json.loads(line)["prompt"] for line in lines)
    elif domain == "modules":
        from ridgeline.quality.corpus import split, standard_library

        yield from (file.text for file in split(standard_library())[1])
    else:
        with (folder / "spec_bench.jsonl").open(encoding="utf-8") as lines:
            asked = (json.loads(line) for line in lines)
            yield from (each["turns"][0] for each in asked if SPEC_BENCH.get(each["category"], "multi_turn") == domain)


def prompts_of(domain: str, engine: Engine, folder: Path, count: int, max_tokens: int) -> list[list[int]]:
    """Return up to `count` prompts as the model takes them, a fixed choice, that leave room for `max_tokens`."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None, "the model has no tokenizer"
    template = ChatTemplate.from_tokenizer(tokenizer) if domain in FAMILIES else None
    found: list[list[int]] = []
    for text in texts(domain, folder):
        if template is not None:
            ids = tokenizer.encode(template.render([{"role": "user", "content": text}]), add_special_tokens=False)
        else:
            ids = tokenizer.encode(text)
        if domain == "modules":
            if len(ids) < MODULE_TOKENS:
                continue
            ids = ids[:MODULE_TOKENS]
        if len(ids) + max_tokens <= engine.info.max_model_len:
            found.append(ids)
    random.Random(0).shuffle(found)
    return found[:count]
