"""tools/check_budgets.py says what is too long, and which exceptions are not needed."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_budgets.py"
LIMITS = """
[[limit]]
folders = ["src", "scripts", "native"]
file_lines = 10
function_lines = 4
"""


@pytest.fixture
def check(tmp_path):
    """Runs the tool over `files`, with `exceptions` in the budget; gives exit status and output."""

    def run(files: dict[str, str], exceptions: str = "") -> tuple[int, str]:
        for name, text in {"tools/budget.toml": LIMITS + exceptions, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        done = subprocess.run([sys.executable, TOOL, tmp_path], capture_output=True, text=True, check=False)
        assert not done.stderr
        return done.returncode, done.stdout

    return run


def exception(path: str, function: str | None = None, reason: str = "it is a table") -> str:
    named = f'function = "{function}"\n' if function else ""
    return f'[[exception]]\npath = "{path}"\n{named}reason = "{reason}"\n'


FITS = "def f():\n    a = 1\n    b = 2\n    return a + b\n"
LONG_FUNCTION = "class A:\n    def f(self):\n        a = 1\n        b = 2\n        c = 3\n        return a\n"


def test_what_fits_passes(check):
    assert check({"src/a.py": FITS, "scripts/run": "x\n" * 10}) == (0, "")


def test_a_long_file_fails(check):
    assert check({"src/p/a.py": "x = 1\n" * 11}) == (1, "src/p/a.py: 11 lines, at most 10 allowed\n")
    assert check({"src/p/a.py": FITS, "scripts/run": "x\n" * 11})[0] == 1
    for name in ("a.cpp", "kernels/a.h"):
        assert check({f"native/{name}": "int a;\n" * 11})[0] == 1


def test_a_long_function_fails_wherever_it_is(check):
    assert check({"src/a.py": LONG_FUNCTION}) == (1, "src/a.py: A.f(): 5 lines, at most 4 allowed\n")
    assert check({"src/a.py": "async " + FITS.replace("return", "c = 3\n    return")})[0] == 1
    assert (
        check({"src/a.py": "if True:\n    def f():\n        def g():\n" + "            x = 1\n" * 4})[1].count("\n")
        == 2
    )


def test_an_exception_allows_one_thing(check):
    assert check({"src/a.py": LONG_FUNCTION}, exception("src/a.py", "A.f")) == (0, "")
    assert check({"src/a.py": LONG_FUNCTION}, exception("src/a.py"))[0] == 1
    assert check({"src/a.py": LONG_FUNCTION, "src/b.py": LONG_FUNCTION}, exception("src/a.py", "A.f"))[0] == 1


def test_an_exception_needs_a_reason(check):
    status, said = check({"src/a.py": LONG_FUNCTION}, exception("src/a.py", "A.f", reason=" "))
    assert status == 1
    assert "no reason" in said


@pytest.mark.parametrize("allowed", [exception("src/a.py", "f"), exception("src/a.py"), exception("src/gone.py")])
def test_an_exception_that_is_not_needed_fails(check, allowed):
    status, said = check({"src/a.py": FITS}, allowed)
    assert status == 1
    assert "no longer needed" in said


def test_a_folder_that_is_too_long_as_a_whole_needs_a_reason(check):
    files = {f"whole/{name}.py": "a = 1\n" * 8 for name in "ab"}
    limit = """
[[limit]]
folders = ["whole"]
file_lines = 10
total_lines = 15
"""
    status, output = check(files, limit)
    assert status == 1 and "whole: 16 lines, at most 15 allowed" in output
    excused = f'{limit}[[exception]]\npath = "whole"\nreason = "two things"\n'
    assert check(files, excused)[0] == 0
    status, output = check({"whole/b.py": "a = 1\n"}, excused)
    assert status == 1 and "no longer needed" in output
