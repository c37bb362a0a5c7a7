"""The benchmark of long batches: one that is killed and goes on has each line once."""

from argparse import Namespace

from benchmarks.batch_lines import SHARES, measure, show


def test_a_killed_batch_has_each_line_once(capsys):
    report = measure(Namespace(model="python-1m", lines=600, kill_at=0.3, threads=1))
    assert (report.missing, report.repeated, report.failed) == (0, 0, 0)
    assert len(report.runs) == 2 and 0 < report.runs[0].lines <= 600
    assert report.marks[0].run == 1 and len(report.marks) == len(SHARES)
    assert all(mark.peak_rss_bytes >= mark.rss_bytes > 2**20 for mark in report.marks)
    show(report)
    assert "missing 0, repeated 0" in capsys.readouterr().out
