"""What the pages ask of commands: a request's life, a diagnosis, a plan; and the pages as files, without a server."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, eventually, new_engine, serving

from browser import SIZES, axe, chromium, serious, window
from ridgeline import LLM, SamplingParams
from ridgeline.cli import main
from ridgeline.core.errors import RequestError
from ridgeline.engine.recording import LENGTH, MAGIC, read_recording
from ridgeline.explain.lives import life
from ridgeline.explain.machine import recorded_machine
from ridgeline.server import explained

__all__ = ["axe", "chromium"]

PAGES = ("chat", "live", "request", "steps", "doctor", "plan", "learn", "numbers")
WORKLOAD = ["--workload=fixed:num_requests=4,input_tokens=16,output_tokens=4", "--concurrency=2"]


@pytest.fixture(scope="module")
def busy(chat_model: Path) -> Iterator[LiveServer]:
    """A server of one slot that has served six requests."""
    with serving(new_engine(chat_model, max_num_seqs=1)) as server:
        for _ in range(6):
            server.complete(prompt="Once upon a time", max_tokens=6, temperature=0)
        journal = server.engine.journal
        eventually(lambda: (journal.steps.num_written, journal.outputs.num_written) == (36, 6))
        yield server


@pytest.fixture(scope="module")
def journal(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of five requests on two slots."""
    path = tmp_path_factory.mktemp("journal") / "run.journal"
    llm = LLM(str(chat_model), dtype="float32", journal=str(path), max_num_seqs=2, max_num_batched_tokens=8)
    prompts = ["Once upon a time there was a little dog", "Once", "A girl", "He", "She"]
    llm.generate(prompts, SamplingParams(max_tokens=6), use_tqdm=False)
    llm.engine.loop.close()
    return path


@pytest.fixture(scope="module")
def exported(journal: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported")
    with pytest.raises(SystemExit) as ended:
        main(["pages", str(out), "--journal", str(journal)])
    assert ended.value.code == 0
    return out


def test_a_life_s_parts_sum_to_its_latency(journal: Path) -> None:
    recording = read_recording(journal)
    assert len(recording.outputs) == 5 and recording.setup is not None
    predict = recorded_machine(recording.setup).step_time.seconds
    times_ms = {
        step: [1e3 * predict(load, behind), 1e3 * seconds]
        for step, (load, behind, seconds) in zip(recording.steps["step"].tolist(), recording.timed())
    }
    assert sum(ms for _, ms in times_ms.values()) > 1e3 * float(recording.steps["run_s"].sum())  # planning counts
    for output in recording.outputs:
        lived = life(recording, int(output["seq_id"]))
        assert sum(lived["parts"].values()) == pytest.approx(1e3 * float(output["latency_s"]))
        assert sum(lived["decoding"].values()) == pytest.approx(lived["parts"]["decode"])
        kinds = [dict(zip(lived["head"], step, strict=True)) for step in lived["steps"]]
        assert sum(step["tokens"] for step in kinds if step["kind"] == "prefill") == output["num_prompt"]
        assert [step["tokens"] for step in kinds if step["kind"] == "decode"] == [1] * (int(output["num_output"]) - 1)
        assert all(0 < step["limit_ms"] < step["predicted_ms"] for step in kinds)
        both_ms = {step["step"]: pytest.approx([step["predicted_ms"], step["measured_ms"]]) for step in kinds}
        assert both_ms == {number: times_ms[number] for number in both_ms}
    waiting = life(recording, int(recording.outputs["seq_id"].max()))
    assert waiting["waits"]["slots"] > 0 and waiting["parts"]["queue"] > 0


def test_the_server_says_what_the_command_says_of_its_last_requests(busy: LiveServer) -> None:
    told = busy.client.get("/explain/steps?outputs=0&steps=-1").json()
    outputs = [dict(zip(told["outputs"]["fields"], row, strict=True)) for row in told["outputs"]["rows"]]
    assert len(outputs) == 6 and told["steps"]["rows"] == []
    for output in outputs:
        said = busy.client.get(f"/explain/doctor?request={output['seq_id']}").json()
        assert said["command"].endswith(f"--request={output['seq_id']}")
        found = said["found"]
        assert found["tokens"]["prompt"] == output["num_prompt"] and found["tokens"]["output"] == output["num_output"]
        assert sum(found["parts"].values()) == pytest.approx(1e3 * output["latency_s"])
    said = busy.client.get("/explain/doctor").json()["found"]
    assert (said["num_requests"], said["num_steps"]) == (6, 36)


def test_the_command_asks_a_server(
    busy: LiveServer, chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--url", f"{busy.url}/", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["num_requests"], found["num_steps"]) == (6, 36)
    assert ended.value.code == int(any(each["severity"] == "FIX" for each in found["findings"]))
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "a"\n')
    with serving(new_engine(chat_model), api_key_file=str(keys)) as server, pytest.raises(SystemExit) as ended:
        main(["doctor", "--url", server.url])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "sent 401" in line
    with serving(new_engine(chat_model), api_key="a") as server, pytest.raises(SystemExit) as ended:
        main(["doctor", "--url", server.url, "--api-key", "a"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no finished request" in line


def test_a_diagnosis_outlives_what_the_rings_lost(chat_model: Path, tmp_path: Path) -> None:
    """The steps of the first requests are written over: what is left is examined, and nothing else."""
    engine = new_engine(chat_model)
    with serving(engine) as server:
        for _ in range(4):
            server.complete(prompt="Once upon a time", max_tokens=8, temperature=0)
        journal = engine.journal
        eventually(lambda: (journal.steps.num_written, journal.outputs.num_written) == (32, 4))
        steps, outputs = (engine.journal.rings[name].read()[1] for name in ("steps", "outputs"))
        ring = engine.journal.steps
        read = ring.read
        ring.read = lambda since=0: read(max(since, int(outputs["first_step"][2]) - 1))
        engine.write_journal(tmp_path / "recent.journal")
    recording = read_recording(tmp_path / "recent.journal")
    assert recording.outputs["seq_id"].tolist() == outputs["seq_id"][2:].tolist()
    assert recording.steps["step"].tolist() == steps["step"][int(outputs["first_step"][2]) - 1 :].tolist()
    assert recording.outputs["first_step"].tolist() == [1, 9]
    assert life(recording, int(outputs["seq_id"][2]))["tokens"]["output"] == 8


@pytest.mark.parametrize(
    ("path", "words"), [("?request=77", "no sequence 77"), ("?request=-1", "sequence -1"), ("?request=x", "integer")]
)
def test_a_request_that_is_not_there_is_named(busy: LiveServer, path: str, words: str) -> None:
    response = busy.client.get(f"/explain/doctor{path}")
    assert response.status_code == 400 and words in response.json()["error"]["message"]


def test_what_is_refused_of_a_journal_that_was_cut_off_is_one_line(journal: Path, tmp_path: Path) -> None:
    """The command also warns of it, on the lines before."""
    data, at = journal.read_bytes(), len(MAGIC)
    for _ in range(4):  # to the outputs, behind what it is of, steps, spans and decisions
        at += LENGTH.size + LENGTH.unpack_from(data, at)[0]
    cut = tmp_path / "cut.journal"
    cut.write_bytes(data[: at + 20])
    with pytest.raises(RequestError, match=r"^the recording holds no finished request"):
        explained.reply_of("doctor", str(cut))


def test_without_a_request_there_is_nothing_to_examine(chat_model: Path) -> None:
    with serving(new_engine(chat_model)) as server:
        response = server.client.get("/explain/doctor")
    assert response.status_code == 400 and "no finished request" in response.json()["error"]["message"]


def test_a_plan_is_the_command_s(busy: LiveServer) -> None:
    asked = ["llama-3-8b", "--hardware=h100-sxm", *WORKLOAD, "--slo=ttft:500 tpot:50", "--allow=int8"]
    said = busy.client.post("/explain/plan", json=asked).json()
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline", "plan", *asked, "--json"], capture_output=True, text=True, check=False
    )
    assert said["found"] == json.loads(done.stdout)
    assert len(said["found"]["points"]) == said["found"]["num_candidates"]


def test_a_plan_is_of_the_served_model_wherever_it_lies(busy: LiveServer, chat_model: Path) -> None:
    said = busy.client.post("/explain/plan", json=["--hardware=h100-sxm", *WORKLOAD]).json()
    assert said["command"].startswith(f"ridgeline plan {chat_model} --hardware=h100-sxm")
    assert said["found"]["num_candidates"] == len(said["found"]["points"]) >= 1


@pytest.mark.parametrize(
    "asked",
    [
        [],
        ["--workload=azure:path=/etc/hostname", "--concurrency=1"],
        ["gpt2", *WORKLOAD],
        ["gpt2", "--hardware=this", *WORKLOAD],
        ["../x", "--hardware=h100-sxm", *WORKLOAD],
        ["--verify", *WORKLOAD],
        [*WORKLOAD, "--slo=ttft:5", "--trace=/etc/hostname"],
        [*WORKLOAD, "--slo=ttft:5\n--trace=x"],
        ["-x", "--hardware=h100-sxm", *WORKLOAD],
    ],
)
def test_a_plan_names_no_file_and_fetches_nothing(busy: LiveServer, asked: list[str]) -> None:
    response = busy.client.post("/explain/plan", json=asked)
    assert response.status_code == 400 and "a plan here is" in response.json()["error"]["message"]


def test_commands_run_one_at_a_time_and_for_one_client_alone(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explained, "MAX_EXPLAIN_S", 0.2)
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "a"\n')
    with serving(new_engine(chat_model), api_key_file=str(keys)) as server:
        server.client.headers["authorization"] = "Bearer a"
        for response in (server.client.get("/explain/doctor"), server.client.post("/explain/plan", json=WORKLOAD)):
            assert response.status_code == 403
        assert httpx.get(f"{server.url}/explain/doctor", trust_env=False).status_code == 401
    with serving(new_engine(chat_model)) as server:
        service = server.server._service
        service.explained.running._locked = True
        assert server.client.get("/explain/doctor").status_code == 503
        service.explained.running._locked = False


@pytest.mark.parametrize("size", SIZES)
def test_a_request_is_followed_from_the_queue_to_its_last_token(chromium: Any, busy: LiveServer, size: str) -> None:
    with window(chromium, busy.url, size) as opened:
        page = opened.open("/#request")
        card = page.locator(".request article")
        card.get_by_role("heading", name="Its steps").wait_for()
        assert page.locator("tbody button").count() == 6
        page.get_by_role("button", name="sequence 1", exact=True).press("Enter")
        card.get_by_role("heading", name="Sequence 1 ").wait_for()
        said = busy.client.get("/explain/doctor?request=1").json()["found"]
        card.get_by_text("Steps as table").click()
        assert card.locator("details tbody tr").count() == len(said["steps"])
        assert "Predicted: prior" in card.inner_text() or "Predicted: calibrated" in card.inner_text()
        assert not opened.is_scrolled_sideways()


@pytest.mark.parametrize("size", SIZES)
def test_the_doctor_shows_every_finding(chromium: Any, busy: LiveServer, size: str) -> None:
    with window(chromium, busy.url, size) as opened:
        page = opened.open("/#doctor")
        page.locator(".areas article").nth(3).wait_for()
        found = busy.client.get("/explain/doctor").json()["found"]
        assert page.locator(".lead").inner_text() == f"{found['sentence']}."
        assert page.locator(".finding code").all_inner_texts() == [each["flag"] for each in found["findings"]]
        assert all(f"[{each['provenance']}]" in page.locator(".areas").inner_text() for each in found["findings"])
        assert not opened.is_scrolled_sideways()


@pytest.mark.parametrize("size", SIZES)
def test_a_plan_is_made_by_keyboard(chromium: Any, busy: LiveServer, size: str) -> None:
    with window(chromium, busy.url, size) as opened:
        page = opened.open("/#plan")
        page.get_by_label("Model").select_option("llama-3-8b")
        page.get_by_label("Machine").select_option("h100-sxm")
        page.get_by_label("Requests").fill("8")
        page.get_by_label("TPOT within, ms").fill("50")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Serve with").wait_for()
        line = page.locator(".command code").last.inner_text()
        assert line.startswith("ridgeline plan llama-3-8b --hardware=h100-sxm") and "tpot:50" in line
        assert page.locator(".planned tbody tr").count() >= 1
        assert "[datasheet]" in page.locator(".planned").inner_text()
        assert not opened.is_scrolled_sideways()
        opened.expected = ("status of 400",)
        page.get_by_label("TPOT within, ms").fill("0.001")
        page.keyboard.press("Enter")
        page.get_by_role("alert").filter(has_text="cannot be: one step").wait_for()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PAGES)
def test_nothing_serious_stands_in_the_way_of_anybody(
    chromium: Any, axe: str, busy: LiveServer, name: str, size: str
) -> None:
    with window(chromium, busy.url, size) as opened:
        page = opened.open(f"/#{name}")
        page.locator(f"main.page-{name} :is(h1, .hero)").first.wait_for()
        if name == "plan":  # on a datasheet's machine: this one's ceilings may not have been measured
            page.get_by_label("Machine").select_option("h100-sxm")
            page.get_by_role("button", name="Plan").click()
        if name in ("request", "doctor", "plan"):
            page.locator(".planned article, .areas article, .request article h3").first.wait_for()
        assert serious(page, axe) == []


@pytest.mark.parametrize("size", SIZES)
def test_the_pages_work_as_files(chromium: Any, exported: Path, journal: Path, size: str) -> None:
    recording = read_recording(journal)
    with _files(chromium, exported, size) as opened:
        page = opened.page
        page.goto(f"{opened.url}/index.html")
        page.locator(".ideas article").wait_for()
        assert page.locator("#nav a").all_inner_texts() == ["Request", "Steps", "Doctor", "Plan", "Learn", "Numbers"]
        page.get_by_role("link", name="Numbers").click()
        page.locator(".number").first.wait_for()
        page.get_by_role("link", name="Steps").click()
        page.locator("#source-A").select_option("live")
        page.get_by_text(f"Step {int(recording.steps['step'][-1])}").first.wait_for()
        page.get_by_role("link", name="Request").click()
        page.get_by_role("heading", name="Its steps").wait_for()
        assert page.locator(".request tbody button").count() == 5
        page.get_by_role("link", name="Doctor").click()
        page.locator(".areas article").nth(3).wait_for()
        page.get_by_role("link", name="Plan").click()
        page.get_by_role("button", name="Plan").click()
        page.get_by_role("alert").filter(has_text="it needs a server").wait_for()
        assert not opened.is_scrolled_sideways()


def test_without_a_journal_the_files_say_what_they_lack(chromium: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["pages", str(tmp_path)])
    with _files(chromium, tmp_path, "wide") as opened:
        opened.page.goto(f"{opened.url}/index.html#doctor")
        opened.page.get_by_role("alert").filter(has_text="it needs a server").wait_for()


def test_of_a_journal_that_was_cut_off_the_pages_are_whole_or_not_there(
    journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, at, ends = journal.read_bytes(), len(MAGIC), [0]
    while at < len(data):
        at += LENGTH.size + LENGTH.unpack_from(data, at)[0]
        ends.append(at)
    codes = list[int]()
    for number, end in enumerate((ends[1] + 9, ends[2] + 9, ends[-2] + 9)):  # within steps, spans and what is last
        (cut := tmp_path / "cut").write_bytes(data[:end])
        out = tmp_path / f"out-{number}"
        with pytest.raises(SystemExit) as ended:
            main(["pages", str(out), "--journal", str(cut)])
        codes.append(int(ended.value.code or 0))
        if codes[-1]:
            assert not out.exists()
            assert capsys.readouterr().err.splitlines()[-1].startswith("ridgeline: ")
        else:
            assert sorted(file.name for file in out.iterdir()) == ["index.html", "ridge.svg", "style.css"]
            assert (out / "index.html").read_text().rstrip().endswith("</html>")
    assert codes[0] and not codes[-1]


def test_files_allow_no_script_but_their_own(exported: Path) -> None:
    html = (exported / "index.html").read_text()
    policy = re.search(r'content-security-policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy[1]
    assert sorted(file.name for file in exported.iterdir()) == ["index.html", "ridge.svg", "style.css"]
    assert str(exported.parent) not in html


def _files(browser: Any, folder: Path, size: str) -> Any:
    return window(browser, f"file://{folder}", size)
