"""Clients of others, unmodified, against `ridgeline serve`: each in an environment of its own, with pinned versions.

    python -m benchmarks.clients                  # all of them; makes the environments, 3 GB with torch for guidellm
    python -m benchmarks.clients litellm lm_eval  # some
    python -m benchmarks.clients --envs FOLDER    # keeps the environments there for the next time

Two servers run over a bundled model, one to generate and one to embed. A `drive_*.py` of this folder is run by the
Python of its environment, asks as its client does, and compares with what a plain HTTP request gets. Its lines are
printed; the exit code is 1 where anything failed. `docs/howto/clients.md` says what is tested of each.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
MODELS = HERE.parents[1] / "src/ridgeline/models"
PATIENCE_S = 900
TOOLS = "--chat-template", str(HERE / "template.jinja"), "--enable-tokenizer-info-endpoint"
READY = re.compile(r"Ridgeline serves .+ at (http://\S+)/v1")


@dataclass(frozen=True)
class Environment:
    """What one is made of; `first` is installed before the rest, which would bring another of it."""

    pins: Sequence[str]
    first: Sequence[str] = ()


LIBRARIES = "litellm==1.110.2", "mcp==2.3.0", "langchain-openai==1.7.4", "instructor==1.17.0", "anthropic==2.13.0"
ENVIRONMENTS = {
    "libraries": Environment(LIBRARIES),
    "llm": Environment(["llm==0.36"]),
    "lm_eval": Environment(["lm-eval[api]==0.4.13", "transformers==5.24.0"]),
    "guidellm": Environment(["guidellm==0.8.1"], first=["torch==2.13.0"]),  # a newer one brings gigabytes for GPUs
}
CLIENTS = dict.fromkeys(("litellm", "langchain", "instructor"), "libraries") | {
    name: name for name in ("llm", "lm_eval", "guidellm")
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}; all by default")
    parser.add_argument("--model", default="python-9m", help="bundled model")
    parser.add_argument("--envs", type=Path, help="folder that keeps the environments")
    options = parser.parse_args()
    if unknown := set(options.clients) - CLIENTS.keys():
        parser.error(f"there is no client {', '.join(sorted(unknown))}: choose of {', '.join(CLIENTS)}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        chosen = options.clients or list(CLIENTS)
        pythons = {name: environment(options.envs or folder / "envs", CLIENTS[name]) for name in chosen}
        served = partial(server, MODELS / options.model, options.model, *TOOLS)
        generates = stack.enter_context(served())
        embeds = stack.enter_context(served("--task", "embed"))
        failed = [name for name in chosen if not drive(name, pythons[name], folder, generates, embeds, options.model)]
    print(f"failed: {', '.join(failed)}" if failed else f"all {len(chosen)} clients did what they should")
    return 1 if failed else 0


def environment(envs: Path, name: str) -> Path:
    """Return the Python of an environment, made where it is not there or has other pins."""
    folder, wanted = envs / name, ENVIRONMENTS[name]
    python, done = folder / "bin/python", folder / "pins.txt"
    pins = [*wanted.first, *wanted.pins]
    if not done.exists() or done.read_text().split() != pins:
        print(f"making an environment of {' '.join(pins)}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        for packages in filter(None, (wanted.first, pins)):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        done.write_text("\n".join(pins))
    return python


@contextmanager
def server(folder: Path, name: str, *options: str) -> Iterator[str]:
    """Serve a model on a free port; give the address."""
    command = [sys.executable, "-m", "ridgeline", "serve", str(folder), "--served-model-name", name]
    command += ["--port", "0", "--log-level", "error", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := READY.search(line):
                yield found[1]
                break
        else:
            raise RuntimeError(f"the server ended with {process.wait()}")
    finally:
        process.terminate()
        process.wait()


def drive(name: str, python: Path, folder: Path, generates: str, embeds: str, model: str) -> bool:
    """Run the script of a client; return whether all that it does went well."""
    own = folder / name
    own.mkdir()
    quiet = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
        "DO_NOT_TRACK": "1",
        "PYTHONWARNINGS": "ignore",
    }
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(own / "hf"), "LLM_USER_PATH": str(own), "NO_COLOR": "1"}
    where = {"GENERATES": generates, "EMBEDS": embeds, "MODEL": model, "FOLDER": str(MODELS / model)}
    keys = {"OPENAI_API_KEY": "unused", "ANTHROPIC_API_KEY": "unused"}
    path = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    everything = {**os.environ, **quiet, **offline, **where, **keys, **path}
    done = subprocess.run([python, HERE / f"drive_{name}.py"], env=everything, cwd=own, check=False, timeout=PATIENCE_S)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
