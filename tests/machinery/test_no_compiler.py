"""Where CMake finds no C++ compiler Ridgeline installs all the same, runs on the reference backend, and says why."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("pip", reason="this interpreter has no pip")
REPO = Path(__file__).resolve().parents[2]
BUILD_REQUIREMENTS = ("scikit-build-core", "nanobind")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, "-C", f"build-dir={folder / 'build'}", REPO],
        env={**os.environ, "CXX": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode and any(
        f"No matching distribution found for {name}" in done.stderr for name in BUILD_REQUIREMENTS
    ):
        pytest.skip(f"pip cannot fetch what the build needs: {', '.join(BUILD_REQUIREMENTS)}")
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_has_all_but_the_native_module(wheel):
    """Also where the checkout has one from a build that found a compiler."""
    command = [sys.executable, REPO / "tools" / "check_wheel.py", "--reference", wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_it_runs_on_the_reference_and_says_so(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
from ridgeline import LLM, SamplingParams
llm = LLM("python-1m", max_model_len=64, num_threads=1)
print(llm.engine.info.choices["backend"])
params = SamplingParams(max_tokens=5, ignore_eos=True)
print(len(llm.generate("def f(", params, use_tqdm=False)[0].outputs[0].token_ids))
"""
    # -S: an editable install of the checkout stays out of the way
    path = os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib")])
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    choice, count = done.stdout.splitlines()
    assert "reference" in choice
    assert "this installation has no native code: it was not built" in choice
    assert "slower, and without ISA levels" in choice
    assert count == "5"
