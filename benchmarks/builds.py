"""Two builds of Ridgeline on the same model, in turns: what a change costs or brings, as ratios within pairs.

usage: python -m benchmarks.builds --old ENV/bin/python --new ENV/bin/python --model MODEL [--pairs 3]
       [--options "" --options "--quantize int4"]

Each run is `ridgeline bench latency` in a process of its own; every second pair begins with the other build. A ratio is
new over old, in tokens/s, of one pair; above 1 the new build is faster.
"""

import json
import shlex
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import RESULTS, option_parser, save

from ridgeline.bench.report import Report

STEPS = ("--prefill", "512", "--decode", "1", "--decode", "16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The rates of both builds in one pair, in tokens/s by step."""

    options: str
    old: dict[str, float]
    new: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildsReport(Report):
    """All pairs, and the median ratio of new to old by options and step."""

    model: str
    old_commit: str | None
    pairs: list[Pair]
    median_ratio: dict[str, dict[str, float]]


def rates(python: Path, model: Path, options: str) -> tuple[dict[str, float], str | None]:
    """Return tokens/s by step of one build, and its commit."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "ridgeline", "bench", "latency", "-m", model, *shlex.split(options), *STEPS]
        subprocess.run([*map(str, command), "--out", folder], check=True, stdout=subprocess.DEVNULL)
        (written,) = Path(folder).rglob("*.json")
        report = json.loads(written.read_text(encoding="utf-8"))
    found = {f"{point['kind']} {point['tokens_per_step']}": point["tok_per_s"]["median"] for point in report["points"]}
    return found, report["software"]["commit"]


def main() -> None:
    parser = option_parser(__doc__, out=RESULTS)
    parser.add_argument("--old", type=Path, required=True, help="interpreter of the environment with the old build")
    parser.add_argument("--new", type=Path, required=True, help="interpreter of the environment with the new build")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--options", action="append", help="of `bench latency`; may be given several times")
    given = parser.parse_args()
    pairs, old_commit = [], None
    for number in range(given.pairs):
        for options in given.options or [""]:
            builds = [given.old, given.new] if number % 2 == 0 else [given.new, given.old]
            measured = {build: rates(build, given.model.resolve(), options) for build in builds}
            old_commit = measured[given.old][1]
            pairs.append(Pair(options=options, old=measured[given.old][0], new=measured[given.new][0]))
            print(options, {step: round(pairs[-1].new[step] / rate, 3) for step, rate in pairs[-1].old.items()})
    ratios = {
        options: {
            step: statistics.median(pair.new[step] / pair.old[step] for pair in pairs if pair.options == options)
            for step in pairs[0].old
        }
        for options in given.options or [""]
    }
    save(
        given.out,
        BuildsReport(
            name=f"builds-{given.model.name}",
            model=given.model.name,
            old_commit=old_commit,
            pairs=pairs,
            median_ratio=ratios,
        ),
    )
    print(json.dumps(ratios, indent=1))


if __name__ == "__main__":
    main()
