"""What the drivers share: where the servers are, plain HTTP requests to compare with, and the list of checks.

Only the standard library: it is run by the Python of a client's environment.
"""

import json
import os
import subprocess
import sys
import traceback
import urllib.request
from collections.abc import Callable

URL, EMBEDS = os.environ["GENERATES"], os.environ["EMBEDS"]
MODEL, FOLDER = os.environ["MODEL"], os.environ["FOLDER"]
TEXT = "import os\nimport "
MESSAGES = [{"role": "user", "content": TEXT}]
GREEDY = {"temperature": 0, "max_tokens": 8}
PAIR = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "pair", "description": "A pair.", "parameters": PAIR}}
_checks: list[Callable[[], object]] = []


def check(function: Callable[[], object]) -> Callable[[], object]:
    """Add a function to what is run; what it returns is printed beside its name."""
    _checks.append(function)
    return function


def run_checks(client: str) -> None:
    """Run all checks, print a line for each, and end the process: with 1 where one failed."""
    failed = 0
    for function in _checks:
        name = f"{client}: {function.__name__.replace('_', ' ')}"
        try:
            found = function()
        except Exception:
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()[-3000:]}", flush=True)
        else:
            print(f"ok     {name}: {str(found)[:160]!r}", flush=True)
    sys.exit(1 if failed else 0)


def post(path: str, url: str = URL, **body: object) -> dict:
    """Return what a plain request is told."""
    data = json.dumps({"model": MODEL, **body}).encode()
    asked = urllib.request.Request(f"{url}/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as reply:
        return json.load(reply)


def said() -> str:
    """Return what the model says to MESSAGES."""
    return post("v1/chat/completions", messages=MESSAGES, **GREEDY)["choices"][0]["message"]["content"]


def is_pair(found: dict) -> bool:
    return set(found) == {"ok", "n"} and isinstance(found["ok"], bool) and 0 <= found["n"] <= 9


def command(*arguments: str) -> str:
    """Run a command of this environment; return what it prints."""
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout
