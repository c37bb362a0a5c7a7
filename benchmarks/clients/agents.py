"""Agents of others, unmodified, against `ridgeline serve`: each asks, calls its tool, and says what came of it.

    python -m benchmarks.clients.agents                    # all of them; npm fetches them, 1 GB
    python -m benchmarks.clients.agents codex --keep FOLDER  # one, and keeps what was fetched

What they run over is `scripted.py`'s model, which asks for the agent's own shell tool once, streamed in pieces, and
then says one sentence. The file that the tool read has to be in what the agent tells, and so has the sentence.
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clients.__main__ import MODELS, server
from benchmarks.clients.scripted import write_model

SENTENCE = "All of it was read."
NAME = "agent"
PATIENCE_S = 180
Settings = tuple[Sequence[str], Mapping[str, str]]  # arguments and environment


@dataclass(frozen=True)
class Agent:
    """A package of npm, the tool of its shell with the argument that holds a command, and how it is asked."""

    package: str
    version: str
    finish: str | None  # script of the package that puts its program in place
    program: str
    tool: str
    argument: str
    more: Mapping[str, str]
    settings: Callable[[Path, str], Settings]


def codex(home: Path, url: str) -> Settings:
    provider = f'name="Ridgeline"\nbase_url="{url}/v1"\nwire_api="responses"\n'
    about = f'model="{NAME}"\nmodel_provider="ours"\n[model_providers.ours]\n{provider}[analytics]\nenabled=false\n'
    (home / "config.toml").write_text(about)
    return ("exec", "--json", "--skip-git-repo-check"), {"CODEX_HOME": str(home)}


def claude(home: Path, url: str) -> Settings:
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1"}
    where = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "unused", "ANTHROPIC_MODEL": NAME}
    asked = "-p", "--output-format", "stream-json", "--verbose", "--allowedTools=Bash"
    return asked, {"HOME": str(home), **quiet, **where}


def opencode(home: Path, url: str) -> Settings:
    models = {NAME: {"name": NAME, "tool_call": True, "limit": {"context": 65536, "output": 4096}}}
    options = {"baseURL": f"{url}/v1", "apiKey": "unused"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Ridgeline", "options": options, "models": models}
    about = {"provider": {"ours": provider}, "model": f"ours/{NAME}", "autoupdate": False, "share": "disabled"}
    (home / "opencode.json").write_text(json.dumps(about))
    return ("run", "--format", "json"), {"HOME": str(home), "OPENCODE_CONFIG": str(home / "opencode.json")}


AGENTS = {
    "codex": Agent("@openai/codex", "0.171.0", None, "codex", "exec_command", "cmd", {}, codex),
    "claude-code": Agent(
        "@anthropic-ai/claude-code", "2.1.332", "install.cjs", "claude", "Bash", "command", {"description": "l"}, claude
    ),
    "opencode": Agent(
        "opencode-ai", "1.18.33", "postinstall.mjs", "opencode", "bash", "command", {"description": "l"}, opencode
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("agents", nargs="*", metavar="AGENT", help=f"of {', '.join(AGENTS)}; all by default")
    parser.add_argument("--keep", type=Path, help="folder that keeps what npm fetched")
    options = parser.parse_args()
    if unknown := set(options.agents) - AGENTS.keys():
        parser.error(f"there is no agent {', '.join(sorted(unknown))}: choose of {', '.join(AGENTS)}")
    with tempfile.TemporaryDirectory() as folder:
        chosen = options.agents or list(AGENTS)
        failed = [name for name in chosen if not drive(AGENTS[name], Path(folder, name), options.keep)]
    print(f"failed: {', '.join(failed)}" if failed else f"all {len(chosen)} agents did what they should")
    return 1 if failed else 0


def drive(agent: Agent, folder: Path, keep: Path | None) -> bool:
    """Ask an agent once; return whether its tool ran and both of what it read and what the model said came out."""
    program = fetched(agent, (keep or folder) / agent.program)
    home, work, secret = folder / "home", folder / "work", secrets.token_hex(8)
    home.mkdir(parents=True)
    work.mkdir()
    (work / "note.txt").write_text(secret)
    write_model(
        folder / "model", MODELS / "python-9m/tokenizer.json", agent.tool,
        {agent.argument: "cat note.txt", **agent.more}, SENTENCE,
    )  # fmt: skip
    with server(folder / "model", NAME, "--max-model-len", "65536") as url:
        arguments, environment = agent.settings(home, url)
        told = subprocess.run(
            [program, *arguments, "What does the note say?"], cwd=work,
            env={**os.environ, "PWD": str(work), **environment},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    went_well = told.returncode == 0 and secret in told.stdout and SENTENCE in told.stdout
    print(f"{'ok    ' if went_well else 'FAILED'} {agent.package} {agent.version}", flush=True)
    if not went_well:
        print(f"{told.stdout[-3000:]}\n{told.stderr[-2000:]}", flush=True)
    return went_well


def fetched(agent: Agent, folder: Path) -> Path:
    """Return the program of an agent, which npm fetches where it is not there."""
    program = folder / "node_modules/.bin" / agent.program
    if not program.exists():
        asked = ["npm", "install", "--silent", "--prefix", folder, f"{agent.package}@{agent.version}"]
        subprocess.run(asked, check=True)
        if agent.finish:
            package = folder / "node_modules" / agent.package
            subprocess.run(["node", agent.finish], cwd=package, check=True, capture_output=True)
    return program


if __name__ == "__main__":
    sys.exit(main())
