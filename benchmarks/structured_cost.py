"""What a grammar costs a token, once it is compiled: structured and plain outputs in turn, at one batch size.

usage: python -m benchmarks.structured_cost [--model python-9m] [--quantize int4] [--batch-size 16]
           [--chat | --examples] [--out DIR]

A token's time is that behind the prompts. Every output has the same number of tokens: plain ones ignore the end of the
text, and no grammar lets an output end so early. With --chat the model is asked, through its chat template, for what
the grammar allows, as its users do; with --examples a model without a template is shown some of it; else it is given
tokens at random, and a grammar forbids nearly all that a model would write. In a pair, plain and structured change
places from one to the next; what is told is the median of the ratios of a pair, with their range.
"""

import argparse
import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common import option_parser, save, spread

from ridgeline import LLM, SamplingParams
from ridgeline.bench.report import Report
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
ASKED = {
    "any text": "Tell a long story about the number {}.",
    "JSON schema": 'Write a JSON array of 500 objects like {{"name": "a town", "n": {}}}, of towns and their people.',
    "regex": "Write {} words in lower case, between spaces, commas and dots.",
}
TOWNS = ("Aachen", "Bergen", "Cadiz", "Delft", "Essen", "Florence", "Ghent", "Haarlem")
EXAMPLES = {
    "any text": '"""Tell a story about the number {}.\n\n',
    "JSON schema": "TOWNS_{0} = {1}\nMORE_{0} = ",
    "regex": "words_{0} = '{2}'\nmore_{0} = '",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """A step of each pair, in milliseconds."""

    plain_ms: list[float]
    structured_ms: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredReport(Report):
    """All pairs, by what bounds the structured one."""

    model: str
    quantize: str | None
    batch_size: int
    is_chat: bool
    has_examples: bool = False
    grammars: dict[str, Pairs]


def seconds(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Return how long a token took of the output that began last, behind its first one: no step has a prompt."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    num_tokens = {len(output.token_ids) for output in outputs}
    assert num_tokens == {params.max_tokens}, f"outputs of {num_tokens} tokens cannot be compared"
    times = [output.timings for output in outputs if output.timings is not None]
    last = max(times, key=lambda each: each.ttft_s or 0.0)
    assert last.tpot_s is not None
    return last.tpot_s


def prompts_of(llm: LLM, name: str, options: argparse.Namespace) -> list[list[int]]:
    """Return the prompts of a batch: what asks for what the grammar of this name allows, shows it, or is random."""
    numbers = range(options.batch_size)
    if options.examples:
        towns = [{"name": town, "n": 700 + at} for at, town in enumerate(TOWNS)]
        texts = [EXAMPLES[name].format(at, json.dumps(towns), " ".join(TOWNS).lower()) for at in numbers]
        return [llm.engine.intake.encode(text) for text in texts]
    if not options.chat:
        return [[5 + at, 17, 31 + at, 8] for at in numbers]
    template = llm.chat_template()
    chats = [[{"role": "user", "content": ASKED[name].format(700 + at)}] for at in numbers]
    return [llm.engine.intake.encode(template.render(chat), add_special_tokens=False) for chat in chats]


def measured(llm: LLM, name: str, options: argparse.Namespace) -> Pairs:
    """Return the times of steps without and with a grammar, in turn."""
    asked, num_tokens, num_pairs = GRAMMARS[name], options.tokens, options.pairs
    prompts = prompts_of(llm, name, options)
    plain = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    kinds = {"plain_ms": plain, "structured_ms": replace(plain, structured_outputs=asked)}
    for params in kinds.values():
        seconds(llm, prompts, params)
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for at in range(num_pairs):
        for name in kinds if at % 2 else reversed(kinds):
            times[name].append(1000 * seconds(llm, prompts, kinds[name]))
    return Pairs(**times)


def show(report: StructuredReport) -> None:
    for name, found in report.grammars.items():
        ratios = [structured / plain for plain, structured in zip(found.plain_ms, found.structured_ms, strict=True)]
        print(f"{name}: {spread(ratios, '.3f')} times {statistics.median(found.plain_ms):.2f} ms a step")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-9m")
    parser.add_argument("--quantize")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--chat", action="store_true", help="ask for what the grammar allows")
    parser.add_argument("--examples", action="store_true", help="show some of what the grammar allows")
    options = parser.parse_args()
    if options.chat and options.examples:
        parser.error("prompts either ask or show: give one of --chat and --examples")
    sizes = {"max_model_len": 256, "max_num_seqs": options.batch_size, "num_threads": options.threads}
    llm = LLM(options.model, quantize=options.quantize, enable_prefix_caching=False, **sizes)
    name = Path(options.model).name
    report = StructuredReport(
        name=f"structured-cost-{name}",
        model=name,
        quantize=options.quantize,
        batch_size=options.batch_size,
        is_chat=options.chat,
        has_examples=options.examples,
        grammars={name: measured(llm, name, options) for name in GRAMMARS},
    )
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
