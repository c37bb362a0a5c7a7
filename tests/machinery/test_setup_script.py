"""scripts/setup refuses a Python that is too old, and does nothing when nothing changed."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path):
    """A folder with setup and the file whose changes matter to it, and nothing else."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPO / "scripts" / "setup", tmp_path / "scripts")
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "kernel.cpp").write_text("int answer = 42;\n")
    for name in ("pyproject.toml", "CMakeLists.txt"):
        shutil.copy(REPO / name, tmp_path)
    return tmp_path


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


def setup(checkout: Path, python: Path | str, extra: str = "test") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", checkout / "scripts" / "setup", extra],
        cwd="/",
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def write_stamp(checkout: Path, extra: str) -> None:
    """What setup leaves behind when it has installed `extra`."""
    script(checkout / ".venv" / "bin" / "python", "exit 9")
    names = ("CMakeLists.txt", "native/kernel.cpp", "pyproject.toml", "scripts/setup")
    contents = b"".join((checkout / name).read_bytes() for name in names)
    sums = subprocess.run(["cksum"], input=contents, capture_output=True, check=True).stdout.decode()
    stamp = f"{platform.python_version()} {sums}"
    (checkout / ".venv" / f"ridgeline-{extra}.stamp").write_text(stamp)


def test_an_old_python_is_named(checkout):
    old = script(checkout / "old-python", 'case "$2" in *version_info*) exit 1;; *) echo 3.9.18;; esac')
    done = setup(checkout, old)
    assert done.returncode == 1
    assert "old-python is Python 3.9.18, but 3.11 or newer is needed" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_missing_python_is_named(checkout):
    done = setup(checkout, "no-such-python")
    assert done.returncode == 1
    assert "no no-such-python found" in done.stderr


@pytest.mark.parametrize(
    ("installed", "asked"),
    [("run", "run"), ("test", "test"), ("dev", "dev"), ("test", "run"), ("dev", "run"), ("dev", "test")],
)
def test_a_second_run_installs_nothing(checkout, installed, asked):
    write_stamp(checkout, installed)
    done = setup(checkout, sys.executable, asked)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_unknown_purpose_is_named(checkout):
    done = setup(checkout, sys.executable, "everything")
    assert done.returncode == 1
    assert "'everything' is none of run, test and dev" in done.stderr


@pytest.mark.parametrize("change", ["asked for more", "pyproject.toml", "native/kernel.cpp"])
def test_a_change_installs_again(checkout, change):
    """Seen from the outside: it says so, and asks the python of .venv, here one that fails at once."""
    write_stamp(checkout, "test")
    if change != "asked for more":
        with (checkout / change).open("a") as file:
            file.write("# changed\n")
    python = script(checkout / "python", f'[ "$2" = venv ] && exit 7; exec {sys.executable} "$@"')
    done = setup(checkout, python, "dev")
    assert "installing into .venv" in done.stderr
    assert done.returncode != 0
    assert not list((checkout / ".venv").glob("*.stamp"))


FAKE_PYTHON = """case "$1 $2" in
"-m venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
"-m pip") echo "$@" >>pip.log ;;
"-m compileall") ;;
"-c import ridgeline._native") exit {native} ;;
*) exec {python} "$@" ;;
esac"""


@pytest.mark.parametrize("native", [True, False])
def test_torch_comes_where_no_native_code_does(checkout, native):
    fake = script(checkout / "fake-python", FAKE_PYTHON.format(native=0 if native else 1, python=sys.executable))
    done = setup(checkout, fake, "run")
    assert done.returncode == 0, done.stderr
    assert ("no C++ compiler or no Python headers here" in done.stderr) == (not native)
    assert ("torch==" in (checkout / "pip.log").read_text()) == (not native)
    assert (checkout / ".venv" / "ridgeline-run.stamp").exists()
