"""What a grammar costs a token, once it is compiled: structured and plain outputs in turn, at one batch size.

Usage: python -m benchmarks.structured_cost [--model python-9m] [--quantize int4] [--batch-size 16] [--pairs 15]
[--json FILE]. Every output has the same number of tokens: plain ones ignore the end of the text, and no grammar lets an
output end so early. In a pair, plain and structured change places from one to the next; what is told is the median of
the ratios of a pair, with the middle half of them.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from ridgeline import LLM, SamplingParams
from ridgeline.core.params import StructuredOutputsParams

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["name", "n"],
        "additionalProperties": False,
    },
    "minItems": 500,
}
GRAMMARS = {
    "any text": StructuredOutputsParams(regex="(?s:.{4000,})"),
    "JSON schema": StructuredOutputsParams(json=SCHEMA),
    "regex": StructuredOutputsParams(regex="([a-z]{2,9}[ ,.]){1000}"),
}


def seconds(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Return how long the outputs took, per token of each."""
    began_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took_s = time.perf_counter() - began_s
    assert params.max_tokens is not None
    num_tokens = {len(output.outputs[0].token_ids) for output in outputs}
    assert num_tokens == {params.max_tokens}, f"outputs of {num_tokens} tokens cannot be compared"
    return took_s / params.max_tokens


def measured(
    llm: LLM, asked: StructuredOutputsParams, batch_size: int, num_tokens: int, num_pairs: int
) -> dict[str, float]:
    """Return the times of a step and their ratio, structured to plain."""
    prompts = [[5 + at, 17, 31 + at, 8] for at in range(batch_size)]
    plain = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    bound = replace(plain, structured_outputs=asked)
    for params in (plain, bound):
        seconds(llm, prompts, params)
    pairs: list[tuple[float, float]] = []
    for at in range(num_pairs):
        times = [seconds(llm, prompts, params) for params in ((plain, bound) if at % 2 else (bound, plain))]
        pairs.append((times[0], times[1]) if at % 2 else (times[1], times[0]))
    ratios = statistics.quantiles([structured / free for free, structured in pairs], n=4)
    return {
        "plain_ms": 1000 * statistics.median(free for free, _ in pairs),
        "structured_ms": 1000 * statistics.median(structured for _, structured in pairs),
        "ratio": ratios[1],
        "ratio_low": ratios[0],
        "ratio_high": ratios[2],
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="python-9m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = {} if args.quantize is None else {"quantize": args.quantize}
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=256,
        max_num_seqs=args.batch_size,
        enable_prefix_caching=False,
        **options,
    )
    found = {name: measured(llm, asked, args.batch_size, args.tokens, args.pairs) for name, asked in GRAMMARS.items()}
    for name, each in found.items():
        ratio = f"{each['ratio']:.3f} ({each['ratio_low']:.3f} to {each['ratio_high']:.3f})"
        print(f"{name:12} {each['plain_ms']:8.3f} ms a step plain, {each['structured_ms']:8.3f} structured: {ratio}")
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "batch_size": args.batch_size, **found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
