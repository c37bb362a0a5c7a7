"""The phases of a start add up, its memory has a limit, and the command measures real starts."""

import json

from benchmarks import startup


def start(kind, repeat, total_s, rss):
    phases = {"weights": total_s / 4, "first token": 3 * total_s / 4}
    return startup.Start(
        kind=kind, repeat=repeat, phases_s=phases, total_s=total_s, peak_rss_bytes=rss, packed_bytes=1_000_000_000
    )


def test_summaries_are_medians_within_a_kind_and_the_most_memory():
    starts = [start("first", i, 40.0, 9_000) for i in range(3)]
    starts += [start("second", i, total_s, rss) for i, (total_s, rss) in enumerate([(4, 7), (16, 5), (8, 6)])]
    found = startup.summarize("second", starts)
    assert (found.total_s, found.min_total_s, found.max_total_s) == (8, 4, 16)
    assert found.phases_s == {"weights": 2, "first token": 6}
    assert found.peak_rss_bytes == 7
    assert found.rss_limit_bytes == 1_650_000_000


def test_a_bundled_model_starts(tmp_path):
    """The disk is timed for first starts alone, and leaves the files as they are."""
    startup.main(["--model=python-1m", "--repeats=1", "--threads=1", "--cold", f"--out={tmp_path}"])
    (path,) = tmp_path.glob("*/*-startup.json")
    report = json.loads(path.read_text())
    first, second = report["summaries"]
    assert first["disk_s"] > 0 and second["disk_s"] is None
    starts = report["starts"]
    assert [each["kind"] for each in starts] == ["first", "second"]
    for each in starts:
        assert abs(sum(each["phases_s"].values()) - each["total_s"]) < 1e-6
        assert all(duration_s > 0 for duration_s in each["phases_s"].values())
        assert each["peak_rss_bytes"] > each["packed_bytes"] > 1_000_000
