"""tests/native/cpp/smoke.cpp, which only scripts/aarch64 builds, compiles against the headers of today."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


def test_the_smoke_program_compiles():
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, "-std=gnu++20", "-fsyntax-only", "-Wall", "-Wextra", f"-I{CHECKOUT / 'native'}"]
    done = subprocess.run(
        [*command, str(CHECKOUT / "tests" / "native" / "cpp" / "smoke.cpp")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
