"""Ratios of paired runs, how a value follows from durations, and the figure."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest
from benchmarks.peers import figure
from benchmarks.peers.__main__ import build_systems, main, parse_arguments, public_command, turn
from benchmarks.peers.report import PeersReport, Run, SystemFacts, compare
from benchmarks.peers.systems import LlamaCpp
from benchmarks.peers.workload import CELLS, START, Cell, PromptSource, measure

from ridgeline.bench.facts import machine_facts, software_facts

DECODE = Cell(name="decode_b4", kind="decode", requests=4, input_tokens=16, output_tokens=32)


def cell_named(name):
    return next(cell for cell in CELLS if cell.name == name)


def system(engine, bits, weights="w"):
    return SystemFacts(
        name=f"{engine} {weights}", engine=engine, bits=bits, weights=weights, options={}, versions={engine: "1"}
    )


def run(system_name, repetition, error=None, **values):
    return Run(
        system=system_name,
        repetition=repetition,
        started_utc="2026-01-01T00:00:00Z",
        duration_s=1.0,
        read_bandwidth_gb_per_s=10.0,
        load_average=0.1,
        steal_share=0.0,
        values=values,
        error=error,
    )


SYSTEMS = [system("ridgeline", 16), system("a", 16), system("b", 16), system("c", 8)]
RUNS = [
    run("ridgeline w", 0, decode_b4=30.0, start=2.0),
    run("a w", 0, decode_b4=10.0, start=3.0),
    run("b w", 0, decode_b4=20.0),
    run("c w", 0, decode_b4=99.0, start=0.1),
    run("ridgeline w", 1, decode_b4=40.0, start=2.0),
    run("a w", 1, decode_b4=8.0, start=1.0),
    run("b w", 1, error="the process ended with exit code 1"),
    run("ridgeline w", 2, decode_b4=10.0, start=2.0),
    run("a w", 2, decode_b4=10.0, start=4.0),
    run("b w", 2, decode_b4=40.0),
]


@pytest.fixture
def report():
    cells = [DECODE.facts(), START.facts()]
    return PeersReport(
        name="peers",
        created_utc="2026-01-01T00:00:00Z",
        command="python -m benchmarks.peers",
        machine=machine_facts(),
        software=software_facts(),
        model="tiny & small",
        threads=2,
        seed=0,
        cells=cells,
        systems=SYSTEMS,
        runs=RUNS,
        comparisons=compare(cells, SYSTEMS, RUNS),
    )


def test_ratios_are_of_the_same_repetition_and_bits(report):
    found = {(pair.cell, pair.peer): pair for pair in report.comparisons}
    assert set(found) == {("decode_b4", "a w"), ("decode_b4", "b w"), ("start", "a w")}  # c has other bits
    against_a, against_b = found["decode_b4", "a w"], found["decode_b4", "b w"]
    assert against_a.ratios == [3.0, 5.0, 1.0]
    assert (against_a.median_ratio, against_a.min_ratio, against_a.max_ratio) == (3.0, 1.0, 5.0)
    assert (against_a.own_median, against_a.peer_median) == (30.0, 10.0)
    assert against_b.ratios == [1.5, 0.25]  # the repetition in which b failed has no pair
    assert against_b.median_ratio == 0.875
    assert against_b.best_peer and not against_a.best_peer


def test_a_shorter_time_is_a_ratio_above_one(report):
    (start,) = (pair for pair in report.comparisons if pair.cell == "start")
    assert start.ratios == [1.5, 0.5, 2.0]


def test_the_result_reads_back(report):
    assert msgspec.json.decode(msgspec.json.encode(report), type=PeersReport) == report


def test_prompts_depend_on_seed_repetition_and_cell_alone():
    def prompts(seed, repetition, cell):
        return PromptSource(seed, repetition, cell, 1000).draw(3, 8)

    assert prompts(0, 0, DECODE) == prompts(0, 0, DECODE)
    others = [prompts(1, 0, DECODE), prompts(0, 1, DECODE), prompts(0, 0, START)]
    assert all(other != prompts(0, 0, DECODE) for other in others)


class Clock:
    """An engine of which a token of prompt takes 1 ms and a step of output 100 ms, with or without a prefix cache."""

    def __init__(self, cached):
        self.asked = []
        self._seen = set() if cached else None

    def __call__(self, prompts, output_tokens):
        self.asked.append((prompts, output_tokens))
        computed = sum(len(prompt) for prompt in prompts if self._seen is None or tuple(prompt) not in self._seen)
        if self._seen is not None:
            self._seen.update(tuple(prompt) for prompt in prompts)
        return 0.001 * computed + 0.1 * output_tokens


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("prefill_512", 512 / 0.612),
        ("decode_b1", 10.0),
        ("decode_b16", 160.0),
        ("decode_8k", 10.0),
        ("serve_16", 16 * 64 / (16 * 0.256 + 6.4)),
        ("prefix_1024", 16 * 16 / (16 * 1.056 + 1.6)),
    ],
)
def test_values_follow_from_durations(name, expected, cached):
    cell = cell_named(name)
    clock = Clock(cached)
    assert measure(cell, clock, PromptSource(0, 0, cell, 50_000)) == pytest.approx(expected)
    longest = max(len(prompt) + output_tokens for prompts, output_tokens in clock.asked for prompt in prompts)
    assert longest <= cell.max_model_len


def test_prefix_requests_share_what_was_asked_before():
    cell, clock = cell_named("prefix_1024"), Clock(cached=False)
    measure(cell, clock, PromptSource(0, 0, cell, 50_000))
    (first, _), (rest, _) = clock.asked[-2:]
    assert len(rest) == 16
    assert all(prompt[:1024] == first[0][:1024] and len(prompt) == 1056 for prompt in rest)
    assert len({tuple(prompt[1024:]) for prompt in rest + first}) == 17


def test_llama_cpp_leaves_out_what_it_cannot_do():
    llama = LlamaCpp(binaries=Path("bin"), gguf=Path("m.gguf"), threads=2, timeout_s=1)
    commands = {cell.name: llama.command(cell) for cell in CELLS}
    assert {name for name, command in commands.items() if command is None} == {"start", "prefix_1024"}
    assert " ".join(commands["decode_8k"]) == "bin/llama-bench -m m.gguf -t 2 -r 1 -o jsonl -p 0 -n 32 -d 8192"
    assert commands["serve_16"][0] == "bin/llama-batched-bench"
    row = {"t_pp": 4.0, "t_tg": 6.0, "speed_tg": 170.0}
    assert llama.value(cell_named("serve_16"), row) == 16 * 64 / 10.0
    assert llama.value(cell_named("decode_b16"), row) == 170.0
    assert llama.value(cell_named("prefill_512"), {"avg_ts": 300.0}) == 300.0


def test_the_command_names_no_folder():
    argv = ["--model", "/a b/c/m", "--gguf", "4", "Q4_0", "../x/m.gguf", "--ridgeline", "16", "bf16", '{"a": "b"}']
    public = public_command(argv)
    assert "/" not in public
    assert public.endswith("""--model m --gguf 4 Q4_0 m.gguf --ridgeline 16 bf16 '{"a": "b"}'""")


def test_the_figure_shows_every_cell_and_its_best_peer(report, tmp_path):
    result, svg = tmp_path / "result.json", tmp_path / "figure.svg"
    result.write_bytes(msgspec.json.encode(report))
    figure.main([str(result), str(result), str(svg)])
    root = ElementTree.parse(svg).getroot()
    namespace = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{namespace}text")]
    for words in ("decode, batch 4", "process start to first token", "0.88× b w", "1.50× a w", "tiny & small", "1×"):
        assert texts.count(words) == 2, words
    assert not any("3.00×" in text for text in texts)  # a is not the best peer in decode
    bars = [element for element in root.iter(f"{namespace}rect") if element.find(f"{namespace}title") is not None]
    assert len(bars) == 4
    assert all(float(bar.get("x")) >= 0 and float(bar.get("x")) + float(bar.get("width")) <= 900 for bar in bars)


@pytest.mark.parametrize("content", ["{}", "no JSON"])
def test_the_figure_refuses_other_files(content, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(SystemExit, match="as a comparison"):
        figure.read_result(path)


def test_systems_with_equal_bits_are_neighbours_and_take_turns(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    options = ["--ridgeline", "16", "bf16", "{}", "--ridgeline", "4", "int4", '{"quantize": "int4"}']
    peers = ["--vllm-python", "python", "--llama-bin", "bin", "--gguf", "4", "Q4_0", "a", "--gguf", "16", "bf16", "b"]
    systems = build_systems(parse_arguments(["--model", str(tmp_path), *options, *peers]), CELLS)
    names = ["ridgeline bf16", "vllm bf16", "llama.cpp bf16", "ridgeline int4", "llama.cpp Q4_0"]
    assert [[system.name for system in turn(systems, repetition)] for repetition in (0, 1, 2)] == [
        names,
        names[::-1],
        names,
    ]
    assert systems[3].options == {"quantize": "int4"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gguf", "4", "Q4_0", "x.gguf"], "--llama-bin"),
        (["--openvino", "8", "int8", "x"], "--openvino-python"),
        (["--ridgeline", "5", "int5", "{}"], "BITS must be one of"),
        (["--repetitions", "0"], "at least 1"),
    ],
)
def test_bad_options_are_refused(options, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path), *options])
    assert message in capsys.readouterr().err
