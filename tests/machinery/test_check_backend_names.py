"""Code that decides by a backend's name is reported, except in the backend's own folder."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import check_backend_names

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path):
    """Two backends, `fast` and `slow`, and a function that writes a module."""
    for name in ("fast", "slow"):
        (tmp_path / "src/ridgeline/backends" / name).mkdir(parents=True)
        (tmp_path / "src/ridgeline/backends" / name / "backend.py").write_text("")

    def write(path, text):
        (tmp_path / "src/ridgeline" / path).write_text(text)
        return check_backend_names.complaints(tmp_path)

    return write


@pytest.mark.parametrize(
    "text",
    [
        'x = backend == "fast"',
        'x = "fast" != backend',
        'x = backend in ("auto", "fast")',
        'x = backend not in {"fast"}',
        'x = {"fast": 1, "other": 2}[backend]',
        'Name = Literal["auto", "fast"]',
        'match backend:\n    case "fast":\n        pass',
        'match backend:\n    case "other" | "fast":\n        pass',
    ],
)
def test_decisions_are_reported(checkout, text):
    (message,) = checkout("build.py", text)
    assert message.startswith("src/ridgeline/build.py:") and "'fast'" in message
    assert len(checkout("backends/slow/backend.py", text)) == 2, "one backend does not decide by another's name"


@pytest.mark.parametrize("text", ['x = "the fast way"', 'x = {"fast": True}', 'print("fast")', 'x = backend == "auto"'])
def test_words_are_not(checkout, text):
    assert checkout("build.py", text) == []


def test_a_backend_knows_itself(checkout):
    assert checkout("backends/fast/backend.py", 'x = backend == "fast"') == []


def test_this_package_is_clean():
    command = [sys.executable, REPO / "tools" / "check_backend_names.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert check_backend_names.backend_names(REPO / check_backend_names.BACKENDS) == {"native", "reference"}
