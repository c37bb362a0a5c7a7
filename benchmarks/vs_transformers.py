"""Ridgeline against transformers' `generate`: same random weights, same prompts, in pairs, in one run.

usage: python benchmarks/vs_transformers.py [--shape qwen3-0.6b] [--pairs 3] [--threads N] [--out benchmarks/results]

Each system runs alone in a fresh process: it loads the model, runs a short warm-up, and is timed once, so that
neither suffers from what the other keeps in memory. The pairs alternate which system goes first. Every pair has
prompts of its own, the same for both, so that no prefix cache helps. Greedy, end of sequence ignored. The memory
bandwidth is measured before and after, by the same run. Needs transformers.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ridgeline.bench.report import Report, save_report
from ridgeline.core.machine import usable_cores

SYSTEMS = ("ridgeline", "transformers")
STREAM_BYTES = 2**30

# hidden, feed-forward, layers, heads, key/value heads, head size, vocabulary
SHAPES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "mid": (512, 1536, 8, 8, 4, 64, 32000),
    "tiny": (64, 128, 2, 4, 2, 16, 512),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same requests by both systems, one right after the other. Rates are output tokens per second."""

    ridgeline_tok_per_s: float
    transformers_tok_per_s: float
    ratio: float
    ridgeline_cpu_s: float  # of all threads: where the machine was shared, its ratio is the steadier one
    transformers_cpu_s: float
    equal_first_tokens: int  # of the requests; in bfloat16 two systems may round differently


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedReport(Report):
    """What ran, where, and the ratio ridgeline / transformers of every pair."""

    transformers: str
    shape: str
    dtype: str
    threads: int
    num_requests: int
    input_tokens: int
    output_tokens: int
    read_bandwidth_gb_per_s: list[float]  # before and after the pairs
    pairs: list[Pair]
    median_ratio: float
    min_ratio: float
    max_ratio: float


class Worker:
    """One system in its own process: a line of JSON in, a line of JSON out."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, __file__, "--role", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, message: object) -> dict:
        """Sends a message and waits for the output."""
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with exit code {self._process.wait()}; see its error above")
        return json.loads(line)

    def close(self) -> None:
        """Lets the process end."""
        self._process.stdin.close()
        self._process.wait()


# ---- in the worker's process: torch is imported here and nowhere else


def write_checkpoint(shape: str, folder: Path) -> None:
    """A Qwen3 of random weights in bfloat16. No tokenizer: the benchmark speaks token ids."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, feed_forward, layers, heads, kv_heads, head_dim, vocabulary = SHAPES[shape]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=40960,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def load_ridgeline(folder: Path, threads: int):
    """A function (prompts, output tokens) -> outputs."""
    from ridgeline import LLM, SamplingParams

    llm = LLM(str(folder), dtype="bfloat16", max_model_len=4096, num_threads=threads)

    def run(prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    return run


def load_transformers(folder: Path, threads: int):
    """A function (prompts, output tokens) -> outputs. Prompts are equally long, so there is no padding to pay for."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        replies = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_tokens,
            min_new_tokens=output_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return replies[:, ids.shape[1] :].tolist()

    return run


def serve_system(system: str, folder: Path, threads: int) -> None:
    """Replies to {prompts, output_tokens} with {duration_s, cpu_s, token_ids}, until the input ends."""
    run = {"ridgeline": load_ridgeline, "transformers": load_transformers}[system](folder, threads)
    for line in sys.stdin:
        message = json.loads(line)
        started, cpu_started = time.perf_counter(), time.process_time()
        token_ids = run(message["prompts"], message["output_tokens"])
        duration_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        print(json.dumps({"duration_s": duration_s, "cpu_s": cpu_s, "token_ids": token_ids}), flush=True)


def read_bandwidth(threads: int) -> None:
    """Replies to every line with the best of five sums over a buffer far larger than any cache, in GB/s."""
    import torch

    torch.set_num_threads(threads)
    for _ in sys.stdin:
        buffer = torch.ones(STREAM_BYTES // 4, dtype=torch.float32)
        durations_s = []
        for _ in range(5):
            started = time.perf_counter()
            buffer.sum()
            durations_s.append(time.perf_counter() - started)
        del buffer
        print(json.dumps({"gb_per_s": STREAM_BYTES / min(durations_s) / 1e9}), flush=True)


# ---- in the parent


WARM_UP_TOKENS = 4


def run_alone(system: str, arguments: argparse.Namespace, folder: Path, rng: random.Random, prompts) -> dict:
    """The result of a fresh process, after a warm-up with other prompts of the same shape."""
    worker = Worker(system, "--folder", str(folder), "--threads", str(arguments.threads))
    worker.ask({"prompts": random_prompts(arguments, rng), "output_tokens": WARM_UP_TOKENS})
    reply = worker.ask({"prompts": prompts, "output_tokens": arguments.output_tokens})
    worker.close()
    return reply


def random_prompts(arguments: argparse.Namespace, rng: random.Random) -> list[list[int]]:
    vocabulary = SHAPES[arguments.shape][-1]
    return [[rng.randrange(vocabulary) for _ in range(arguments.input_tokens)] for _ in range(arguments.requests)]


def run_pair(arguments: argparse.Namespace, folder: Path, rng: random.Random, flip: bool) -> Pair:
    """Both systems on the same prompts, one after the other; `flip` lets transformers go first."""
    prompts, output_tokens = random_prompts(arguments, rng), arguments.output_tokens
    replies = {}
    for system in reversed(SYSTEMS) if flip else SYSTEMS:
        replies[system] = run_alone(system, arguments, folder, rng, prompts)
        lengths = {len(token_ids) for token_ids in replies[system]["token_ids"]}
        if lengths != {output_tokens}:
            raise SystemExit(f"{system} gave outputs of {sorted(lengths)} tokens where {output_tokens} were asked for")
    rates = {system: len(prompts) * output_tokens / replies[system]["duration_s"] for system in SYSTEMS}
    first = [[token_ids[0] for token_ids in replies[system]["token_ids"]] for system in SYSTEMS]
    return Pair(
        ridgeline_tok_per_s=rates["ridgeline"],
        transformers_tok_per_s=rates["transformers"],
        ratio=rates["ridgeline"] / rates["transformers"],
        ridgeline_cpu_s=replies["ridgeline"]["cpu_s"],
        transformers_cpu_s=replies["transformers"]["cpu_s"],
        equal_first_tokens=sum(own == other for own, other in zip(*first)),
    )


def compare(arguments: argparse.Namespace, folder: Path, console: Console) -> tuple[list[Pair], list[float]]:
    """All pairs, and the memory bandwidth before and after them."""
    rng = random.Random(arguments.seed)
    stream_gb_per_s = [measure_stream(arguments)]
    pairs = []
    for number in range(arguments.pairs):
        pair = run_pair(arguments, folder, rng, flip=number % 2 == 1)
        console.print(
            f"pair {number + 1}: ridgeline {pair.ridgeline_tok_per_s:.1f}, "
            f"transformers {pair.transformers_tok_per_s:.1f} output tokens/s, ratio {pair.ratio:.2f}; "
            f"CPU time {pair.ridgeline_cpu_s:.1f} and {pair.transformers_cpu_s:.1f} s; "
            f"{pair.equal_first_tokens} of {arguments.requests} first tokens equal",
            highlight=False,
            soft_wrap=True,
        )
        pairs.append(pair)
    stream_gb_per_s.append(measure_stream(arguments))
    return pairs, stream_gb_per_s


def measure_stream(arguments: argparse.Namespace) -> float:
    """GB/s that all threads read from memory together."""
    worker = Worker("stream", "--threads", str(arguments.threads))
    gb_per_s = worker.ask(None)["gb_per_s"]
    worker.close()
    return gb_per_s


def measure(arguments: argparse.Namespace) -> None:
    """Writes the checkpoint, runs the pairs, prints and saves the result."""
    import importlib.metadata

    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / arguments.shape
        subprocess.run(
            [sys.executable, __file__, "--role", "write", "--shape", arguments.shape, "--folder", str(folder)],
            check=True,
        )
        pairs, stream_gb_per_s = compare(arguments, folder, console)
    ratios = [pair.ratio for pair in pairs]
    report = PairedReport(
        name="vs-transformers" if arguments.shape == "qwen3-0.6b" else f"vs-transformers-{arguments.shape}",
        transformers=importlib.metadata.version("transformers"),
        shape=arguments.shape,
        dtype="bfloat16",
        threads=arguments.threads,
        num_requests=arguments.requests,
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
        read_bandwidth_gb_per_s=stream_gb_per_s,
        pairs=pairs,
        median_ratio=statistics.median(ratios),
        min_ratio=min(ratios),
        max_ratio=max(ratios),
    )
    path = save_report(arguments.out, report)
    console.print(
        f"ratio ridgeline / transformers: median {report.median_ratio:.2f} "
        f"({report.min_ratio:.2f}–{report.max_ratio:.2f}) over {len(pairs)} pairs; "
        f"memory bandwidth {stream_gb_per_s[0]:.1f} and {stream_gb_per_s[1]:.1f} GB/s\nwritten: {path}",
        highlight=False,
        soft_wrap=True,
    )


def main() -> None:
    """The parent without --role; otherwise one of its helpers."""
    default_threads = usable_cores()
    parser = argparse.ArgumentParser(description="Ridgeline against transformers' generate, in pairs.")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=default_threads)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--role", choices=("parent", "write", "stream", *SYSTEMS), default="parent", help="internal")
    parser.add_argument("--folder", type=Path, help="internal")
    arguments = parser.parse_args()
    match arguments.role:
        case "parent":
            if min(arguments.pairs, arguments.requests, arguments.input_tokens, arguments.output_tokens) < 1:
                parser.error("pairs, requests and tokens must be at least 1")
            measure(arguments)
        case "write":
            write_checkpoint(arguments.shape, arguments.folder)
        case "stream":
            read_bandwidth(arguments.threads)
        case system:
            serve_system(system, arguments.folder, arguments.threads)


if __name__ == "__main__":
    main()
