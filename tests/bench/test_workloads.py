"""Workloads: every kind deterministic and of the stated shape; the traces against the files they were published as."""

import csv
import gzip
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.bench.load import Load
from ridgeline.bench.workload import FIRST_RANDOM_TOKEN_ID, BenchRequest
from ridgeline.bench.workloads import describe_workload, parse_workload, workload_kinds
from ridgeline.core.errors import ConfigError

AZURE = "traces/azure2023_code.csv"
MOONCAKE = "traces/mooncake_synthetic.jsonl"
SPEC_BENCH = "prompts/spec_bench.jsonl"
HUMAN_EVAL = "prompts/HumanEval.jsonl.gz"
FILES = {"azure": AZURE, "mooncake": MOONCAKE, "prompts": SPEC_BENCH}


def build(kind, shared_data, **options):
    if kind in FILES:
        options = {"path": shared_data / FILES[kind], **options}
    return parse_workload(f"{kind}:" + ",".join(f"{name}={value}" for name, value in options.items()))


@pytest.mark.parametrize("kind", workload_kinds())
def test_every_kind_is_deterministic_ordered_and_sized(kind, shared_data):
    requests = build(kind, shared_data, num_requests=20).requests()
    assert requests == build(kind, shared_data, num_requests=20).requests()
    assert len(requests) == 20
    assert all(request.prompt and request.max_tokens >= 1 for request in requests)
    arrivals = [request.arrival_s for request in requests]
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)


@pytest.mark.parametrize("kind", [kind for kind in workload_kinds() if kind != "prompts"])
def test_random_ids_stay_in_the_vocabulary_and_follow_the_seed(kind, shared_data):
    requests = build(kind, shared_data, num_requests=10, vocab_size=40).requests()
    ids = {token for request in requests for token in request.prompt}
    assert ids <= set(range(FIRST_RANDOM_TOKEN_ID, 40))
    assert len(ids) > 30
    other = build(kind, shared_data, num_requests=10, vocab_size=40, seed=1).requests()
    assert [one.prompt for one in requests] != [one.prompt for one in other]


@pytest.mark.parametrize("kind", ["fixed", "uniform"])
def test_a_larger_workload_begins_with_the_smaller_one(kind, shared_data):
    small, large = (build(kind, shared_data, num_requests=count).requests() for count in (5, 9))
    assert large[:5] == small


def test_fixed_lengths():
    requests = parse_workload("fixed:num_requests=3,input_tokens=17,output_tokens=5").requests()
    assert [(len(one.prompt), one.max_tokens, one.ignore_eos) for one in requests] == [(17, 5, True)] * 3
    assert len({tuple(one.prompt) for one in requests}) == 3


def test_uniform_lengths_reach_both_ends():
    text = "uniform:num_requests=200,input_min=2,input_max=5,output_min=1,output_max=3"
    requests = parse_workload(text).requests()
    assert {len(one.prompt) for one in requests} == {2, 3, 4, 5}
    assert {one.max_tokens for one in requests} == {1, 2, 3}


def test_shared_prefix_repeats_each_prefix_evenly():
    text = "shared_prefix:num_requests=22,num_prefixes=4,prefix_tokens=32,suffix_tokens=8"
    requests = parse_workload(text).requests()
    prefixes = [tuple(one.prompt[:32]) for one in requests]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [5, 5, 6, 6]
    assert {len(one.prompt) for one in requests} == {40}
    assert len({tuple(one.prompt[32:]) for one in requests}) == 22
    assert prefixes[:4] != prefixes[4:8]  # shuffled, not in turns


def test_azure_follows_the_file(shared_data):
    with (shared_data / AZURE).open(newline="") as file:
        rows = list(csv.DictReader(file))[:300]
    requests = build("azure", shared_data, num_requests=300).requests()
    assert [len(one.prompt) for one in requests] == [int(row["ContextTokens"]) for row in rows]
    assert [one.max_tokens for one in requests] == [int(row["GeneratedTokens"]) for row in rows]
    # 18:17:03.979960 is the first row, 18:17:04.031960 the second
    assert requests[1].arrival_s == pytest.approx(0.052, abs=1e-6)


def test_azure_scales_and_caps(shared_data):
    plain = build("azure", shared_data, num_requests=50).requests()
    options = {"time_scale": 0.5, "length_scale": 0.1, "max_prompt_tokens": 300, "max_output_tokens": 2}
    scaled = build("azure", shared_data, num_requests=50, **options).requests()
    assert [one.arrival_s for one in scaled] == pytest.approx([one.arrival_s / 2 for one in plain])
    assert [len(one.prompt) for one in scaled] == [min(300, max(1, round(len(one.prompt) * 0.1))) for one in plain]
    assert {one.max_tokens for one in scaled} == {1, 2}


def common_prefix(first, second):
    for at, (left, right) in enumerate(zip(first, second)):
        if left != right:
            return at
    return min(len(first), len(second))


@pytest.mark.parametrize(("scale", "block"), [(1.0, 512), (0.0625, 32)])
def test_mooncake_prompts_share_exactly_the_blocks_the_trace_says(shared_data, scale, block):
    with (shared_data / MOONCAKE).open() as file:
        rows = [json.loads(next(file)) for _ in range(200)]
    requests = build("mooncake", shared_data, num_requests=200, length_scale=scale).requests()
    assert [len(one.prompt) for one in requests] == [round(row["input_length"] * scale) for row in rows]
    sharing = 0
    for (row_a, a), (row_b, b) in itertools.combinations(zip(rows, requests), 2):
        blocks = common_prefix(row_a["hash_ids"], row_b["hash_ids"])
        # Past the shared blocks the tokens are random, so a few may agree by chance.
        whole = min(blocks * block, len(a.prompt), len(b.prompt))
        assert whole <= common_prefix(a.prompt, b.prompt) <= whole + 4
        sharing += blocks > 0
    assert sharing == 14


def test_mooncake_cap_keeps_the_beginning(shared_data):
    whole = build("mooncake", shared_data, num_requests=8).requests()
    cut = build("mooncake", shared_data, num_requests=8, max_prompt_tokens=1000, time_scale=0.1).requests()
    assert [one.prompt for one in cut] == [one.prompt[:1000] for one in whole]
    assert [one.arrival_s for one in cut] == pytest.approx([one.arrival_s / 10 for one in whole])


def test_prompts_of_spec_bench_and_human_eval(shared_data):
    lines = [json.loads(line) for line in (shared_data / SPEC_BENCH).read_text().splitlines()]
    assert [one.prompt for one in build("prompts", shared_data, num_requests=1000).requests()] == [
        line["turns"][0] for line in lines
    ]
    maths = build("prompts", shared_data, category="math_reasoning", num_requests=5, output_tokens=9).requests()
    expected = [line["turns"][0] for line in lines if line["category"] == "math_reasoning"][:5]
    assert maths == [BenchRequest(prompt=text, max_tokens=9, ignore_eos=False) for text in expected]
    problems = build("prompts", shared_data, path=shared_data / HUMAN_EVAL, num_requests=164).requests()
    with gzip.open(shared_data / HUMAN_EVAL, "rt") as file:
        assert [one.prompt for one in problems] == [json.loads(line)["prompt"] for line in file]


BAD_FILES = {
    "azure": [
        "",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n",
        "a,b\n1,2\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1\n",
    ],
    "mooncake": [
        "",
        "{",
        '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-1]}',
    ],
    "prompts": ["", "[]", '{"prompt": ""}', '{"turns": [1]}'],
}


@pytest.mark.parametrize(("kind", "content"), [(kind, text) for kind, texts in BAD_FILES.items() for text in texts])
def test_a_broken_file_is_one_clear_error(kind, content, tmp_path):
    path = tmp_path / "broken"
    path.write_text(content)
    with pytest.raises(ConfigError, match="broken"):
        parse_workload(f"{kind}:path={path}").requests()


@pytest.mark.parametrize("kind", sorted(BAD_FILES))
@pytest.mark.parametrize("name", ["absent", "absent.gz"])
def test_a_missing_file_is_one_clear_error(kind, name, tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        parse_workload(f"{kind}:path={tmp_path / name}").requests()


def test_a_file_that_is_not_gzip(tmp_path):
    path = tmp_path / "plain.jsonl.gz"
    path.write_text('{"prompt": "x"}')
    with pytest.raises(ConfigError, match="plain"):
        parse_workload(f"prompts:path={path}").requests()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing", "choose one of azure, fixed"),
        ("../fixed", "unknown workload"),
        ("fixed:input=3", "options are num_requests, input_tokens"),
        ("fixed:input_tokens", "cannot read 'input_tokens'"),
        ("fixed:input_tokens=many", "input_tokens"),
        ("fixed:input_tokens=0", "input_tokens must be at least 1, got 0"),
        ("fixed:seed=-1", "seed must be"),
        ("fixed:vocab_size=3", "vocab_size must be"),
        ("uniform:input_min=9,input_max=3", "input_min must be"),
        ("shared_prefix:num_requests=3,num_prefixes=4", "num_prefixes must be"),
        ("azure:path=x,time_scale=nan", "time_scale must be"),
        ("azure", "path"),
        ("mooncake:path=x,length_scale=0.001", "length_scale must be"),
    ],
)
def test_bad_options_are_one_clear_error(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_workload(text)


def test_describe_names_the_file_and_its_hash_but_not_its_folder(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "x"}')
    facts = describe_workload(parse_workload(f"prompts:path={path}"))
    assert (facts.kind, facts.options["path"]) == ("prompts", "mine.jsonl")
    assert len(facts.sha256) == 64
    assert describe_workload(parse_workload("fixed")).sha256 is None


REQUESTS = [BenchRequest(prompt="x", max_tokens=1, arrival_s=float(3 - at)) for at in range(4)]


def test_burst_and_trace_times():
    assert [one.arrival_s for one in Load().schedule_requests(REQUESTS)] == [0.0] * 4
    assert [one.arrival_s for one in Load(schedule="trace").schedule_requests(REQUESTS)] == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(ConfigError, match="no requests"):
        Load().schedule_requests([])


@given(st.floats(0.01, 1000), st.floats(0.05, 50), st.integers(1, 200), st.integers(0, 2**31))
def test_poisson_arrivals_keep_the_rate(rate_per_s, burstiness, count, seed):
    load = Load(schedule="poisson", request_rate_per_s=rate_per_s, burstiness=burstiness, seed=seed)
    requests = [BenchRequest(prompt="x", max_tokens=1)] * count
    arrivals = [one.arrival_s for one in load.schedule_requests(requests)]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] >= 0
    assert arrivals[-1] == pytest.approx(count / rate_per_s)
    assert load.schedule_requests(requests) == load.schedule_requests(requests)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness):
    load = Load(schedule="poisson", request_rate_per_s=10.0, burstiness=burstiness)
    times = [0.0] + [one.arrival_s for one in load.schedule_requests([BenchRequest(prompt="x", max_tokens=1)] * 20000)]
    gaps = [late - early for early, late in zip(times, times[1:])]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.1)
    assert mean**2 / variance == pytest.approx(burstiness, rel=0.1)  # a gamma distribution's shape


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "poisson"},
        {"request_rate_per_s": 1.0},
        {"schedule": "poisson", "request_rate_per_s": 0.0},
        {"schedule": "poisson", "request_rate_per_s": float("nan")},
        {"burstiness": -1.0},
        {"max_concurrency": 0},
        {"time_limit_s": float("inf")},
        {"request_timeout_s": 0.0},
        {"seed": -1},
    ],
)
def test_bad_loads_are_refused(options):
    with pytest.raises(ConfigError):
        Load(**options)
