"""Predictions of few steps: there are requests for all of them, and too few are refused in one line."""

import pytest
from benchmarks import predict


@pytest.mark.parametrize("num_steps", [9, 40])
def test_few_steps_have_requests_enough(tmp_path, num_steps):
    taken = predict.run(predict.config_of("python-1m", "bf16", 1), num_steps, tmp_path / "journal")
    assert len(taken) >= num_steps


@pytest.mark.parametrize("options", [["--steps", "8"], ["--runs", "1"]])
def test_too_few_steps_or_runs_are_refused(options, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["predict", "python-1m", *options])
    with pytest.raises(SystemExit) as stopped:
        predict.main()
    assert stopped.value.code == 2
    assert "--steps must be more than 8, which warm up, and --runs at least 2" in capsys.readouterr().err
