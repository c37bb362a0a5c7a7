"""What a model is, costs and keeps is known without torch, and so is a server: importing these packages loads neither
it nor transformers.

The import contracts of pyproject.toml say the same of the source; this says it of a running interpreter.
"""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from children import Child

PROGRAM = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(len([name for name in sys.modules if name.startswith(sys.argv[1])]))
assert not {"torch", "transformers"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    "package", ["core", "spec", "program", "cost", "cache", "text", "quant", "weights", "engine", "server", "explain"]
)
def test_package_does_without_torch(package):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"ridgeline.{package}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1


# What a process has mapped once its command is done, at the path in the first argument.
RUN = """
import sys
from pathlib import Path
from ridgeline.cli import main
try:
    main(sys.argv[2:])
finally:
    Path(sys.argv[1]).write_text(Path("/proc/self/maps").read_text())
"""
API = """
import sys
from pathlib import Path
from ridgeline import LLM, SamplingParams
llm = LLM("python-1m", num_threads=1)
llm.generate("def f(", SamplingParams(max_tokens=4, repetition_penalty=1.2, top_p=0.9, logprobs=3), use_tqdm=False)
Path(sys.argv[1]).write_text(Path("/proc/self/maps").read_text())
"""
# A finder in front of all others: torch is not there.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"
GENERATE = ("generate", "-m", "python-1m", "def f(", "--max-tokens", "4")
COMMANDS = {
    "generate": GENERATE,
    "generate int4": (*GENERATE, "--quantize", "int4", "--temperature", "0.7", "--top-p", "0.9"),
    "evaluate": ("evaluate", "python-1m", "--tokens", "64", "--quantize", "int4"),
    "bench offline": (
        "bench",
        "offline",
        "-m",
        "python-1m",
        "--workload",
        "fixed:num_requests=2,input_tokens=8",
    ),
}

linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc/PID/maps on this system")


def torch_files(maps: str) -> set[str]:
    """The files of torch among those that a process has mapped."""
    files = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    return {file for file in files if "torch" in file.split("site-packages/")[-1]}


def maps_of(tmp_path, program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "maps", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return (tmp_path / "maps").read_text()


@linux
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_on_the_native_backend_maps_no_torch(name, tmp_path):
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    maps = maps_of(tmp_path, RUN, *COMMANDS[name])
    assert "_native" in maps
    assert torch_files(maps) == set()


@linux
def test_the_python_api_maps_no_torch(tmp_path):
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    maps = maps_of(tmp_path, API)
    assert "_native" in maps
    assert torch_files(maps) == set()


@linux
def test_a_serving_process_maps_no_torch():
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    command = [sys.executable, "-c", "from ridgeline.cli import main; main()", "serve", "python-1m", "--port", "0"]
    with Child([*command, "--num-threads", "1"], stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split()[-1]
            body = {"prompt": "def f(", "max_tokens": 4, "logprobs": 2, "frequency_penalty": 0.5, "top_p": 0.9}
            response = httpx.post(f"{url}/completions", json=body, timeout=60)
            assert response.json()["usage"]["completion_tokens"] == 4
            (engine,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            server, computing = (Path(f"/proc/{number}/maps").read_text() for number in (process.pid, engine))
        finally:
            process.terminate()
    assert "_native" in computing and "_native" not in server
    assert torch_files(computing) == torch_files(server) == set()


@linux
def test_the_reference_backend_maps_it(tmp_path):
    """Without this the tests above could not fail."""
    assert torch_files(maps_of(tmp_path, RUN, *GENERATE, "--backend", "reference"))


def test_what_needs_torch_names_the_extra(tmp_path):
    command = [sys.executable, "-c", WITHOUT_TORCH + RUN, tmp_path / "maps", *GENERATE]
    done = subprocess.run([*command, "--backend", "reference"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "pip install 'ridgeline[torch]'" in line
