"""The examples of the documents run as they stand.

Every `python` block is a program, every line of a `console` block that starts with "$ " a command, unless the line
above the block says `<!-- not run: why -->`. Blocks of other languages are text. A block that talks to
http://127.0.0.1:8000 gets a server with the bundled model, on a port that is free; one that names a file of tools/ runs
in the checkout.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from markdown_docs import DOCUMENTS, REPO, Block, blocks

from children import Child

SERVER = "http://127.0.0.1:8000"
MODEL = "python-9m"
START_TIMEOUT_S = 120
EXAMPLE_TIMEOUT_S = 120
OWN_TEST = {REPO / "docs" / "howto" / "add-a-family.md": "tests/contracts/test_howto_family.py"}

EXAMPLES = [
    block
    for document in DOCUMENTS
    if document not in OWN_TEST
    for block in blocks(document)
    if block.language in ("python", "console") and block.reason is None
]


@pytest.fixture(scope="module")
def server():
    """Base URL of `ridgeline serve`, ready."""
    command = [sys.executable, "-m", "ridgeline", "serve", MODEL, "--port", "0", "--log-level", "warning"]
    with Child(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            said = ""
            while (ready := re.search(r" at (http://\S+)/v1", said)) is None:
                line = process.stdout.readline()
                assert line, f"the server did not become ready:\n{said}"
                said += line
            watchdog.cancel()
            yield ready[1]
        finally:
            watchdog.cancel()
            process.terminate()
            process.communicate(timeout=60)


def commands(block: Block) -> list[str]:
    """The commands of a console block; a trailing backslash continues one."""
    found: list[str] = []
    continues = False
    for line in block.text.splitlines():
        if continues:
            found[-1] += "\n" + line
        elif line.startswith("$ "):
            found.append(line.removeprefix("$ "))
        else:
            continue
        continues = line.endswith("\\")
    return found


def run(arguments: list[str], folder: Path) -> str:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    (folder / ".curlrc").write_text("fail\n")  # an HTTP error is an exit status
    done = subprocess.run(
        arguments,
        cwd=REPO if "tools/" in arguments[-1] else folder,
        env={**os.environ, "PATH": path, "CURL_HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=EXAMPLE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("block", EXAMPLES, ids=str)
def test_example(block, tmp_path, request):
    text = block.text
    if "$ curl " in text and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    if SERVER in text:
        text = text.replace(SERVER, request.getfixturevalue("server"))
    if block.language == "python":
        assert run([sys.executable, "-W", "error", "-c", text], tmp_path).strip()
        return
    found = commands(Block(block.document, block.line, block.language, text, None))
    assert found, "a console block needs a line that starts with '$ '"
    for command in found:
        assert run(["bash", "-euo", "pipefail", "-c", command], tmp_path).strip()


def test_the_reasons_not_to_run_are_few():
    """The blocks that are not run are the ones that start something that never ends, or set up a checkout."""
    untested = [str(block) for document in DOCUMENTS for block in blocks(document) if block.reason is not None]
    assert len(untested) <= 3, untested
