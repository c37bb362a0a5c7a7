"""Greedy tokens are the same from Python, both engines of a server and the batch command, under a grammar or not.

The grammar is one that does not bind: any text.
"""

import json
import subprocess
import sys
from pathlib import Path

from live_server import serving

from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.engine.process.client import ProcessEngine
from ridgeline.engine.thread_engine import ThreadEngine

PROMPTS = ("def add(a, b):", "import os\n", "class Tree:\n    def ", "for i in range(10):")
ANY = "(?s:.*)"
GREEDY = {"temperature": 0, "max_tokens": 48}
CONFIG = EngineConfig.of("python-1m", num_threads=1, max_model_len=512)


def test_greedy_tokens(tmp_path: Path) -> None:
    plain = SamplingParams(**GREEDY)
    bound = SamplingParams(**GREEDY, structured_outputs=StructuredOutputsParams(regex=ANY))
    llm = LLM("python-1m", num_threads=1, max_model_len=512)
    alone = [llm.generate([prompt], plain, use_tqdm=False)[0].outputs[0] for prompt in PROMPTS]
    tokens = [list(output.token_ids) for output in alone]
    assert sum(map(len, tokens)) > 100
    found = {
        "alone, bound": [
            list(llm.generate([prompt], bound, use_tqdm=False)[0].outputs[0].token_ids) for prompt in PROMPTS
        ]
    }
    for name, params in (("together", plain), ("together, bound", bound)):
        outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
        found[name] = [list(output.outputs[0].token_ids) for output in outputs]
    for engine in (ThreadEngine, ProcessEngine):
        with serving(engine(CONFIG)) as server:
            for fields in ({}, {"guided_regex": ANY}):
                body = {"prompt": list(PROMPTS), **GREEDY, "return_token_ids": True, **fields}
                choices = server.complete(**body)["choices"]
                found[f"{engine.__name__} {fields}"] = [choice["token_ids"] for choice in choices]
    assert all(each == tokens for each in found.values()), [name for name, each in found.items() if each != tokens]
    assert answers_of_the_batch_command(tmp_path) == tokens * 2


def answers_of_the_batch_command(folder: Path) -> list[list[int]]:
    """The tokens of all prompts, plain and bound, as the command writes them."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    bodies = [
        {"prompt": prompt, **GREEDY, "return_token_ids": True, **fields}
        for fields in ({}, {"guided_regex": ANY})
        for prompt in PROMPTS
    ]
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": body}
        for at, body in enumerate(bodies)
    ]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    options = "--model", "python-1m", "--num-threads", "1", "--max-model-len", "512"
    subprocess.run(
        [sys.executable, "-m", "ridgeline", "batch", source, output, *options], check=True, capture_output=True
    )
    results = {each["custom_id"]: each for each in map(json.loads, output.read_text().splitlines())}
    return [results[str(at)]["response"]["body"]["choices"][0]["token_ids"] for at in range(len(lines))]
