"""The pages without a browser: files, headers, sizes, who may ask for what."""

import gzip
import re
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, eventually, new_engine, serving

UI = Path(str(resources.files("ridgeline.server"))) / "ui"
MAX_BYTES = 90_000  # of all own code, gzipped


def test_the_address_leads_to_the_page(live: LiveServer) -> None:
    redirect = live.client.get("/ui")
    assert redirect.status_code == 307
    page = live.client.get("/ui", follow_redirects=True)
    assert page.status_code == 200 and page.url.path == "/ui/"
    assert page.headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize("file", sorted(UI.iterdir()), ids=lambda file: file.name)
def test_every_file_is_served_under_the_policy(live: LiveServer, file: Path) -> None:
    response = live.client.get(f"/ui/{file.name}")
    assert response.status_code == 200 and response.content == file.read_bytes()
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "style-src 'self';" in policy
    assert "unsafe" not in policy and "http" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


def test_scripts_have_the_type_that_browsers_demand(live: LiveServer) -> None:
    assert live.client.get("/ui/app.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert live.client.get("/ui/style.css").headers["content-type"] == "text/css; charset=utf-8"


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapp.py", "%2e%2e/app.py", "..%5capp.py", "ui", "sub/app.js"])
def test_nothing_else_is_served(live: LiveServer, name: str) -> None:
    response = live.client.get(f"/ui/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_the_code_is_small() -> None:
    assert sum(len(gzip.compress(file.read_bytes())) for file in UI.iterdir()) <= MAX_BYTES


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    html = (UI / "index.html").read_text()
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=", html)
    for file in UI.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"""(src|href|import|url|fetch)\b[\s("'=]*(https?:)?//\w""", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)


@pytest.mark.parametrize("file", sorted(UI.glob("*.js")), ids=lambda file: file.name)
def test_scripts_parse(file: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    done = subprocess.run(
        [node, "--input-type=module", "--check"], input=file.read_text(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_server_says_what_it_serves(live: LiveServer) -> None:
    said = live.client.get("/explain/server").json()
    assert (said["use"], said["chat_template"], said["models"]) == ("chat", True, ["stories-chat"])
    assert said["max_model_len"] == 512
    assert said["choices"]["dtype"] == {"value": "float32", "reason": "as asked"}


def test_steps_are_told_from_a_number_on(live: LiveServer) -> None:
    before = live.engine.journal.steps.num_written
    live.complete(prompt="Once", max_tokens=5, temperature=0)
    eventually(lambda: live.engine.journal.steps.num_written == before + 5)  # a step is recorded after its output left
    told = live.client.get("/explain/steps").json()
    steps = [dict(zip(told["steps"]["fields"], row, strict=True)) for row in told["steps"]["rows"]]
    assert [step["num_tokens"] for step in steps[-4:]] == [1, 1, 1, 1]
    assert told["wait_reasons"][0] == ""
    end = told["steps"]["first"] + len(steps)
    later = live.client.get(f"/explain/steps?steps={end - 2}&spans=-1").json()
    assert later["steps"]["first"] == end - 2 and later["steps"]["rows"] == told["steps"]["rows"][-2:]
    assert later["spans"]["rows"] == []


def test_a_number_that_is_none_is_refused(live: LiveServer) -> None:
    response = live.client.get("/explain/steps?steps=last")
    assert response.status_code == 400
    assert "integer" in response.json()["error"]["message"]


def test_pages_need_no_key_and_what_they_show_does(chat_model: Path) -> None:
    with serving(new_engine(chat_model), api_key="secret") as server:
        assert server.client.get("/ui/").status_code == server.client.get("/ui/app.js").status_code == 200
        for path in ("/explain/server", "/explain/steps", "/metrics", "/uimetrics", "/ui/../metrics"):
            assert httpx.get(server.url + path, trust_env=False).status_code == 401, path
        server.client.headers["authorization"] = "Bearer secret"
        assert server.client.get("/explain/server").status_code == 200


def test_steps_of_several_clients_are_not_told(chat_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "a"\n')
    with serving(new_engine(chat_model), api_key_file=str(keys)) as server:
        response = server.client.get("/explain/steps", headers={"authorization": "Bearer a"})
    assert response.status_code == 403
    assert "--api-key-file" in response.json()["error"]["message"]


def test_another_name_gets_no_page(chat_model: Path) -> None:
    with serving(new_engine(chat_model), allowed_hosts=("127.0.0.1",)) as server:
        assert server.client.get("/ui/", headers={"host": "elsewhere.example"}).status_code == 421


def test_what_the_pages_show_of_simulations_is_what_python_says() -> None:
    tool = Path(__file__).parents[2] / "tools" / "pages_data.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
