"""scripts/run: a chat model answers where it can be fetched, else the bundled model writes."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run"


@pytest.fixture
def checkout(tmp_path):
    """The script beside a setup that does nothing and a `ridgeline` that writes down its arguments."""

    def make(pull_exit):
        (tmp_path / "scripts").mkdir()
        shutil.copy(SCRIPT, tmp_path / "scripts" / "run")
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        command = f'#!/bin/sh\n[ "$1" = pull ] && echo "ridgeline: a reason" >&2 && exit {pull_exit}\necho "ran: $*"\n'
        for name, text in {"scripts/setup": "#!/bin/sh\n", ".venv/bin/ridgeline": command}.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        return tmp_path

    return make


def run(folder, *arguments):
    done = subprocess.run([folder / "scripts" / "run", *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines(), done.stderr


def test_the_first_text_is_an_answer(checkout):
    lines, _ = run(checkout(0))
    assert lines[0] == "> What is a large language model? Answer in two sentences."
    assert lines[1].startswith(f"ran: chat smollm2 --quick {lines[0].removeprefix('> ')} ")


def test_offline_the_bundled_model_writes(checkout):
    lines, err = run(checkout(3))
    assert lines == ["ran: generate python-9m --seed 4"]
    assert err.startswith("ridgeline: a reason\nscripts/run: no chat model without a network")


def test_arguments_go_to_generate(checkout):
    lines, err = run(checkout(3), "python-9m", "def main(", "-n", "64")
    assert (lines, err) == (["ran: generate python-9m def main( -n 64"], "")
