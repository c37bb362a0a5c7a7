"""Fuzz a parser: python -m tests.fuzz PARSER [--seconds 60] [--seed 0] [--input FILE] [--keep DIR] [--random]
or: python -m tests.fuzz PARSER --count N

Any bytes must become a value or the project's own error, within 2 s and bounds of memory. Inputs are chosen by the code
that they reach where atheris is installed (`pip install atheris`), else at random. A finding is shown, kept in a file
of DIR, and makes the exit code 1; `--input` tries such a file again. PARSER `all` takes one after the other.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from tests.fuzz.harness import Checked, Finding, inputs
from tests.fuzz.parsers import PARSERS, opened

MEMORY_MB = 4096


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parser", choices=(*PARSERS, "all"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--count", type=int, default=0, help="try so many inputs at random, however long that takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--input", type=Path, help="try this input alone")
    parser.add_argument("--keep", type=Path, default=Path("findings"), help="folder for findings")
    parser.add_argument("--random", action="store_true", help="change seeds at random, also where atheris is there")
    return parser.parse_args(arguments)


def at_random(name: str, seconds: float, seed: int, keep: Path, count: int = 0) -> bool:
    """Change seeds at random, for some time or `count` times; return whether nothing was found."""
    with tempfile.TemporaryDirectory() as folder:
        checked = Checked(opened(name, Path(folder)))
        deadline_s = time.monotonic() + seconds
        for number, data in enumerate(inputs(checked.target, seed)):
            if number == count if count else time.monotonic() > deadline_s:
                break
            try:
                checked(data)
            except Finding as error:
                print(f"{name}: {error}\n  kept: {kept(keep, name, data)}", flush=True)
                return False
    told = ", ".join(f"{count:,} {what}" for what, count in sorted(checked.counts.items()))
    print(f"{name}: {told}; nothing found", flush=True)
    return True


def kept(keep: Path, name: str, data: bytes) -> Path:
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"{name}-{hashlib.sha1(data).hexdigest()[:10]}"
    path.write_bytes(data)
    return path


def by_coverage(name: str, seconds: float, seed: int, keep: Path) -> bool:
    """Let atheris choose inputs, in a process of its own, which ends at a finding; return whether there was none."""
    keep.mkdir(parents=True, exist_ok=True)
    limits = [f"-max_total_time={seconds:.0f}", "-timeout=20", f"-rss_limit_mb={MEMORY_MB}", f"-seed={seed + 1}"]
    command = [sys.executable, "-m", "tests.fuzz.guided", name, *limits, "-print_final_stats=1"]
    command += [f"-artifact_prefix={keep}/{name}-", "-verbosity=0"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    stats = dict(line[6:].split(": ", 1) for line in done.stderr.splitlines() if line.startswith("stat::"))
    told = f"{stats.get('number_of_executed_units', '?').strip()} inputs, {stats.get('peak_rss_mb', '?').strip()} MB"
    print(f"{name}: {told}; {'nothing found' if not done.returncode else done.stderr[-3000:]}", flush=True)
    return not done.returncode


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.input is not None:
        with tempfile.TemporaryDirectory() as folder:
            opened(options.parser, Path(folder)).run(options.input.read_bytes() or b"\0")
        print("nothing found")
        return 0
    run = at_random if options.random or find_spec("atheris") is None else by_coverage
    chosen = PARSERS if options.parser == "all" else [options.parser]
    if options.count:
        return sum(not at_random(name, 0, options.seed, options.keep, options.count) for name in chosen)
    return sum(not run(name, options.seconds, options.seed, options.keep) for name in chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
