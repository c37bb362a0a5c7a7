"""One start, timed from within: the process that startup.py starts. Arguments: MODEL THREADS OPTIONS CLOCK.

CLOCK is the parent's perf_counter at the start of this process; on one machine all processes share it. Whatever is
imported here before the first look at the clock counts as the interpreter's time.
"""

import json
import sys
import time
from pathlib import Path

PROMPT_TOKENS = 16


def start_once(model: str, threads: int, options: dict, spawned_s: float) -> None:
    """Starts, generates a token, and prints what took how long."""
    marks_s = [spawned_s, time.perf_counter()]
    from ridgeline import LLM, SamplingParams

    marks_s.append(time.perf_counter())
    from ridgeline.backends.native.backend import NativePlan
    from ridgeline.backends.reference.backend import ReferencePlan
    from ridgeline.weights.folder import ModelFolder

    bounds_s: list[float] = []  # of reading the tokenizer and of opening the weights, which run side by side

    def clock(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def run(*args: object, **kwargs: object) -> object:
            bounds_s.append(time.perf_counter())
            try:
                return function(*args, **kwargs)
            finally:
                bounds_s.append(time.perf_counter())

        setattr(owner, name, run)

    clock(ModelFolder, "tokenizer")
    for plan in (NativePlan, ReferencePlan):
        clock(plan, "open")
    llm = LLM(model, num_threads=threads, **options)
    marks_s.append(time.perf_counter())
    llm.generate([list(range(PROMPT_TOKENS))], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    marks_s.append(time.perf_counter())
    interpreter_s, ridgeline_s, engine_s, token_s = (b - a for a, b in zip(marks_s, marks_s[1:]))
    loading_s = max(bounds_s) - min(bounds_s)
    reply = {
        "phases_s": {
            "interpreter": interpreter_s,
            "import ridgeline": ridgeline_s,
            "tokenizer and weights": loading_s,
            "rest of the engine": engine_s - loading_s,
            "first token": token_s,
        },
        "total_s": marks_s[-1] - marks_s[0],
        "peak_rss_bytes": peak_rss_bytes(),
        "packed_bytes": llm.engine.info.weight_bytes,
    }
    print(json.dumps(reply), flush=True)  # the end waits for the pack, and is not asked for


def peak_rss_bytes() -> int:
    """Peak memory of this program; getrusage would count what it was forked from. 0 where there is no /proc."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    start_once(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), float(sys.argv[4]))
