"""No level's instructions leak into another: what a level's objects define lies within the level's namespace."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("ridgeline._native", reason="the native module is not built")
from ridgeline import _native

REPO = Path(__file__).resolve().parents[2]
WIDER = {
    "portable": r"%[yzt]mm|%k[0-7]|\tv[a-z]",
    "avx2": r"%[zt]mm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])\b",
    "avx512": r"%tmm|\tv\w*bf16",
    "avx512bf16": r"%tmm",
}


def objects(pattern: str) -> list[Path]:
    found = sorted(REPO.glob(f"build/cp*/native/CMakeFiles/{pattern}"))
    if not found:
        pytest.skip("the objects of the build are not in this checkout's build/")
    if shutil.which("nm") is None or shutil.which("objdump") is None:
        pytest.skip("nm and objdump (binutils) are not installed")
    return found


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_levels_are_named_narrowest_first():
    levels = _native.runnable_levels()
    assert levels[0] == "portable"
    assert _native.best_level() == [name for name in levels if name != "amx_emulated"][-1]


def test_no_code_of_a_level_has_run_where_the_machine_does_not_run_it():
    """A build has all levels, and loading it on a machine with fewer must not touch the others' code."""
    assert _native.filled_levels() == _native.runnable_levels()


def test_a_level_runs_nothing_when_the_module_is_loaded():
    """A constructor of a global would run before anything could ask what the machine is able to run."""
    for path in objects("level_*.dir/levels/*.o"):
        assert ".init_array" not in output("objdump", "-h", path), f"{path} has a constructor"


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match=r"'sse9' does not run here; those that do: portable"):
        _native.peak("sse9", "f32", 1, 0.001, 1)


def test_shared_symbols_stay_in_their_level():
    """An inline function from a common header could be kept once for all levels, with the widest level's code."""
    for path in objects("level_*.dir/levels/*.o"):
        level = path.parents[1].name.removeprefix("level_").removesuffix(".dir")
        for line in output("nm", "-C", "--defined-only", path).splitlines():
            kind, name = line.split(maxsplit=2)[1:]
            if kind in "TWVuBDR":
                assert f"ridgeline::{level}::" in name, f"{path.name} of level {level} defines {name} for everybody"


@pytest.mark.parametrize("level", WIDER)
def test_a_level_has_no_wider_instructions(level):
    for path in objects(f"level_{level}.dir/levels/*.o"):
        found = re.search(WIDER[level], output("objdump", "-d", "--no-show-raw-insn", path))
        assert found is None, f"{path}: {found}"


def test_the_code_around_the_kernels_is_for_every_machine():
    for pattern in ("ridgeline_runtime.dir/runtime/*.o", "_native.dir/bind/*.o"):
        for path in objects(pattern):
            found = re.search(WIDER["portable"], output("objdump", "-d", "--no-show-raw-insn", path))
            assert found is None, f"{path}: {found}"
