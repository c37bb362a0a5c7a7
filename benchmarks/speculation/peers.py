"""Drafts here and in another engine, each beside its own decoding without: the same prompts, greedy, batch 1.

usage: python -m benchmarks.speculation.peers --model MODEL --peer llama.cpp|vllm --peer-python PATH [--draft MODEL]
       [--domains qa rag] [--prompts 4] [--max-tokens 96] [--speculate auto] [--tokens 10]

PATH is the Python of an environment with llama-cpp-python, or with vLLM for CPUs. The other engine drafts by lookup in
the prompt, or with --draft by that model, which drafts here as well. All four hold the prompt in their caches before
they are timed, so what is timed is decoding; they take turns at each prompt, in an order that moves on. Ends of
sequence are ignored. Beside the gains stand the speeds, and how many outputs are those of the other engine without
drafts, token by token: where they are not, rounding decided otherwise.
"""

import argparse
import json
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import option_parser, save
from benchmarks.speculation.domains import DATA, DOMAINS, FAMILIES, prompts_of
from benchmarks.speculation.turns import Timed
from rich.console import Console
from rich.table import Table

from ridgeline import SamplingParams
from ridgeline.bench.report import Report
from ridgeline.core.config import EngineConfig

DRIVERS = Path(__file__).parents[1] / "peers/drivers"
PEERS = {"llama.cpp": "run_llama.py", "vllm": "run_vllm.py"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCell:
    """One system on one domain: a ratio of times a prompt, without drafts over with, and tokens/s of all prompts."""

    beside: str  # the other engine
    drafts: str  # lookup, or draft: a model
    system: str
    domain: str
    gain: float  # the median ratio
    ratios: list[float]
    off_tokens_per_s: float
    on_tokens_per_s: float
    same_on_off: float  # share of the outputs with drafts that are those without
    same_as_peer: float  # share of the outputs without drafts that are the other engine's


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersOfSpeculationReport(Report):
    """All cells of one run."""

    model: str
    speculate: str
    tokens: int  # of a draft of the other engine
    max_tokens: int
    versions: dict[str, str]
    cells: list[PeerCell]


class Driver:
    """A process of the other environment, which `benchmarks/peers/drivers/worker.py` serves."""

    def __init__(self, python: Path, driver: str, job: Mapping[str, object]) -> None:
        command = [str(python), str(DRIVERS / driver)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions: dict[str, str] = self._ask(job)["versions"]

    def run(self, prompt: Sequence[int], max_tokens: int) -> tuple[float, list[int]]:
        reply = self._ask({"prompts": [list(prompt)], "output_tokens": max_tokens})
        return reply["duration_s"], reply["output_tokens"][0]

    def close(self) -> None:
        assert self._process.stdin is not None, "it was opened with pipes"
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, what: Mapping[str, object]) -> dict:
        process = self._process
        assert process.stdin is not None and process.stdout is not None, "it was opened with pipes"
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())


class Own:
    """This engine, asked as a Driver is."""

    def __init__(self, config: EngineConfig) -> None:
        self.timed = Timed(config)

    def run(self, prompt: Sequence[int], max_tokens: int) -> tuple[float, list[int]]:
        turn = self.timed.run([prompt], [SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)])
        return turn.seconds, turn.outputs[0].token_ids


def measure(options: argparse.Namespace, peers: Sequence[Driver]) -> Iterator[PeerCell]:
    """Yield the cells, domain by domain; `peers` are the other engine without drafts and with."""
    base = {"num_threads": options.threads, "seed": 0, "max_model_len": options.context}
    configs = (EngineConfig.of(options.model, **base, speculate=name) for name in ("off", options.speculate))
    own = [Own(config) for config in configs]
    systems = [*own, *peers]
    for domain in options.domains:
        prompts = prompts_of(domain, own[0].timed.engine, options.data, options.prompts, options.max_tokens)
        took_s: list[list[float]] = [[] for _ in systems]
        outputs: list[list[list[int]]] = [[] for _ in systems]
        for number, prompt in enumerate(prompts):
            for system in systems:
                system.run(prompt, 1)  # the prompt is in its cache now
            for turn in range(len(systems)):
                index = (number + turn) % len(systems)
                seconds, tokens = systems[index].run(prompt, options.max_tokens)
                took_s[index].append(seconds)
                outputs[index].append(tokens)
        for which, name in enumerate(("ridgeline", options.peer)):
            off, on = 2 * which, 2 * which + 1
            ratios = [one / other for one, other in zip(took_s[off], took_s[on], strict=True)]
            num_tokens = len(prompts) * options.max_tokens
            yield PeerCell(
                beside=options.peer,
                drafts="draft" if options.draft else "lookup",
                system=name,
                domain=domain,
                gain=statistics.median(ratios),
                ratios=ratios,
                off_tokens_per_s=num_tokens / sum(took_s[off]),
                on_tokens_per_s=num_tokens / sum(took_s[on]),
                same_on_off=_same(outputs[off], outputs[on]),
                same_as_peer=_same(outputs[off], outputs[2]),
            )


def drafting(options: argparse.Namespace) -> dict[str, object]:
    """Return the options of a driver that drafts."""
    if options.peer == "llama.cpp":
        return {"tokens": options.tokens, "draft": options.draft}
    how: dict[str, object] = {"model": options.draft} if options.draft else {"method": "ngram", "prompt_lookup_max": 5}
    return {"speculative_config": how | {"num_speculative_tokens": options.tokens}}


def _same(some: Sequence[list[int]], others: Sequence[list[int]]) -> float:
    return statistics.mean(one == other for one, other in zip(some, others, strict=True))


def show(cells: Sequence[PeerCell]) -> None:
    """Print a row for each cell."""
    table = Table("domain", "system", "gain", "range", "tokens/s off", "on", "same on and off", "same as peer")
    for each in cells:
        spread = f"{min(each.ratios):.2f} to {max(each.ratios):.2f}"
        rates = f"{each.off_tokens_per_s:.0f}", f"{each.on_tokens_per_s:.0f}"
        shares = f"{each.same_on_off:.0%}", f"{each.same_as_peer:.0%}"
        table.add_row(each.domain, each.system, f"{each.gain:.2f}", spread, *rates, *shares)
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", required=True, help="what both read: a .gguf file for llama.cpp, a folder for vLLM")
    parser.add_argument("--peer", choices=PEERS, default="llama.cpp")
    parser.add_argument("--peer-python", type=Path, required=True)
    parser.add_argument("--domains", nargs="+", choices=DOMAINS, default=list(FAMILIES))
    parser.add_argument("--prompts", type=int, default=4, help="of each domain")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--speculate", help="what drafts here (default auto, or the --draft model)")
    parser.add_argument("--draft", help="a model that drafts in both, in place of lookups")
    parser.add_argument("--tokens", type=int, default=10, help="that the other drafts; 10 is llama.cpp's default")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of spec_bench.jsonl")
    options = parser.parse_args(arguments)
    options.speculate = options.speculate or (f"draft:{options.draft}" if options.draft else "auto")
    job = {"model": options.model, "threads": options.threads, "max_model_len": options.context, "max_num_seqs": 1}
    jobs = [job | {"options": each} for each in ({}, drafting(options))]
    peers = [Driver(options.peer_python, PEERS[options.peer], each) for each in jobs]
    cells = list(measure(options, peers))
    show(cells)
    report = PeersOfSpeculationReport(
        name=f"speculation-beside-{Path(options.model).stem}",
        model=Path(options.model).stem,
        speculate="draft" if options.draft else options.speculate,
        tokens=options.tokens,
        max_tokens=options.max_tokens,
        versions=peers[0].versions,
        cells=cells,
    )
    for peer in peers:
        peer.close()
    save(options.out, report)


if __name__ == "__main__":
    main()
