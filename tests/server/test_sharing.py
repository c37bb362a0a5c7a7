"""One client does not get in the way of another: slots, tokens, keys with limits, prefixes of their own, fair turns."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine, fake_info
from live_server import PATIENCE_S, LiveServer, eventually, gated_serving, new_engine, serving
from starlette.exceptions import HTTPException

from ridgeline.core.errors import ConfigError, OverloadedError
from ridgeline.server.clients import Allowance, Client, Keys
from ridgeline.server.service import RequestNote, Service
from ridgeline.server.settings import ServerSettings, require_safe_host

KEY_FILE = """
[alice]
key = ["alice-old", "alice-new"]
requests_per_minute = 3

[bob]
key = "bob-key"
tokens_per_minute = 10
"""


@contextmanager
def held(live: LiveServer, **body: object) -> Iterator[None]:
    """A request that stays open."""
    with ThreadPoolExecutor(1) as pool:
        eventually(lambda: live.server._service.num_slots == 0)
        asked = pool.submit(lambda: httpx.post(f"{live.url}/v1/completions", json=body, timeout=PATIENCE_S))
        eventually(lambda: live.server._service.num_slots > 0 and live.engine.num_unfinished)
        yield
        live.engine.go = True
        assert asked.result().status_code == 200
    eventually(lambda: live.server._service.num_slots == 0)


def test_slots_count_outputs_and_are_refused_before_a_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(fake_info(max_num_seqs=4), room=99)
    engine.go = False
    with serving(engine, max_queued_requests=6) as live:
        with held(live, prompt=[1], n=4, max_tokens=1), monkeypatch.context() as patch:
            patch.setattr(live.server._service.intake, "encode", lambda *args, **options: pytest.fail("tokenized"))
            for body in ({"prompt": [1], "n": 7}, {"prompt": "a", "n": 8}, {"prompt": [[1]] * 7}):
                refused = live.post("completions", **body)
                assert refused.status_code == 503, body
                assert refused.json()["error"]["code"] == "server_is_overloaded"
                assert refused.headers["retry-after"] == "1"
        assert live.post("completions", prompt=[[1]] * 10, max_tokens=1).status_code == 200
        never = live.post("completions", prompt=[[1]] * 11, max_tokens=1)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        eventually(lambda: live.server._service.num_slots == 0)


def test_slots_come_back_whatever_ends_a_request() -> None:
    engine = FakeEngine(fake_info(), room=99)
    with serving(engine) as live:
        service = live.server._service
        assert live.post("completions", prompt=[1], nope=1).status_code == 400
        assert live.post("completions", prompt=[], n=3).status_code == 400
        assert live.post("completions", prompt=[9999]).status_code == 400
        eventually(lambda: service.num_slots == 0)  # the last one's is given back behind its response
        service.reserve(note := RequestNote("id"), -3)
        assert service.num_slots == 0, "n below 0, which is read later, makes no room for others"
        service.release(note)
        assert live.post("completions", prompt=[1], max_tokens=3, stream=True).text.endswith("data: [DONE]\n\n")
        engine.go = False
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{live.url}/v1/completions", json={"prompt": [1], "n": 2}, timeout=0.3)
        eventually(lambda: service.num_slots == service.num_queued_tokens == 0)


def test_a_flood_never_takes_the_last_slots() -> None:
    """Sixteen slots are one client's at most; another finds one of the two beyond them, and a third one where the first
    leaves room."""

    def taken(client: int, num_outputs: int) -> int:
        """How many of so many requests get a slot."""
        count = 0
        for _ in range(num_outputs):
            note = RequestNote("id", client=Client(client))
            try:
                service.reserve(note, 1)
            except OverloadedError:
                service.release(note)
                continue
            notes.append(note)
            count += 1
        return count

    notes: list[RequestNote] = []
    service = Service(FakeEngine(fake_info(max_num_seqs=4)), None, ServerSettings(max_queued_requests=12))
    service.engine.start()
    assert [taken(1, 40), taken(2, 9), taken(1, 1), taken(3, 9), taken(2, 9)] == [16, 1, 0, 0, 0]
    for note in notes:
        service.release(note)
    assert service.num_slots == 0 and not service._slots_of
    assert [taken(client, 5) for client in range(4)] == [5, 5, 5, 2]


def test_tokens_of_prompts_have_a_cap_that_one_long_prompt_may_exceed() -> None:
    engine = FakeEngine(fake_info(), room=99)
    with serving(engine, max_queued_tokens=10) as live:
        assert live.post("completions", prompt=[1] * 20, max_tokens=1).status_code == 200
        engine.go = False
        with held(live, prompt=[1] * 8, max_tokens=1):
            eventually(lambda: live.server._service.num_queued_tokens == 8)
            assert live.post("completions", prompt=[1] * 3, max_tokens=1).status_code == 503
        assert live.post("completions", prompt=[1] * 3, max_tokens=1).status_code == 200


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(KEY_FILE)
    return file


def ask(live: LiveServer, key: str, **body: object) -> httpx.Response:
    return live.client.post(
        "/v1/completions", json={"prompt": [1], "max_tokens": 1} | body, headers={"authorization": f"Bearer {key}"}
    )


def test_keys_of_a_file_have_limits_of_their_own(key_file: Path) -> None:
    with serving(FakeEngine(fake_info()), api_key_file=str(key_file), api_key="root") as live:
        for wrong in ("alice", "alice-ol", "bob-key2"):
            assert ask(live, wrong).status_code == 401
        assert [ask(live, key).status_code for key in ("alice-old", "alice-new", "alice-old")] == [200] * 3
        refused = ask(live, "alice-new")
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert live.client.get("/v1/models", headers={"authorization": "Bearer alice-old"}).status_code == 200
        assert ask(live, "bob-key", prompt=[1] * 20, max_tokens=1).status_code == 200  # into debt
        assert ask(live, "bob-key").status_code == 429
        assert [ask(live, "root").status_code for _ in range(9)] == [200] * 9
        assert "alice-old" not in refused.text


def test_sighup_reads_the_keys_again(key_file: Path) -> None:
    with serving(FakeEngine(fake_info()), api_key_file=str(key_file)) as live:
        key_file.write_text('[carol]\nkey = "carol-key"\n')
        live.server._reload()
        assert (ask(live, "carol-key").status_code, ask(live, "bob-key").status_code) == (200, 401)
        key_file.write_text("[carol\n")
        live.server._reload()
        assert ask(live, "carol-key").status_code == 200


def test_sighup_gives_no_key_a_new_allowance(key_file: Path) -> None:
    with serving(FakeEngine(fake_info()), api_key_file=str(key_file)) as live:
        assert ask(live, "bob-key", prompt=[1] * 20, max_tokens=1).status_code == 200  # into debt
        live.server._reload()
        assert ask(live, "bob-key").status_code == 429
        key_file.write_text(KEY_FILE.replace("tokens_per_minute = 10", "tokens_per_minute = 11"))
        live.server._reload()
        assert ask(live, "bob-key").status_code == 200


@pytest.mark.parametrize(
    "text",
    ["[a", "[a]", 'a = "b"', "[a]\nkey = 1", '[a]\nkey = ""', '[a]\nkey = []', '[a]\nkey = "b"\nlimit = 1',
     '[a]\nkey = "b"\nrequests_per_minute = 0', "\x00", '[""]\nkey = "b"', '[a]\nkey = "k"\n[b]\nkey = ["l", "k"]',
     '[a]\nkey = "root"'],
)  # fmt: skip
def test_a_bad_key_file_is_one_line(key_file: Path, text: str) -> None:
    key_file.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.toml") as error:
        Keys("root", str(key_file))
    assert "\n" not in str(error.value)


def test_an_allowance_fills_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    allowance = Allowance(60)
    allowance._updated_s = now[0]
    allowance.left -= 60
    for waited_s, message in ((0, "retry in 1 s"), (0.5, "retry in 1 s")):
        now[0] += waited_s
        with pytest.raises(HTTPException, match=message):
            allowance.require("tokens", 0.0)
    now[0] += 0.6
    allowance.require("tokens", 0.0)
    allowance.left -= 30
    now[0] += 1000
    allowance.require("tokens", 0.0)
    assert allowance.left == 60


def test_a_key_file_is_a_key_for_hosts_that_others_reach() -> None:
    require_safe_host("0.0.0.0", has_keys=ServerSettings(api_key_file="f").has_keys, insecure_no_auth=False)


def test_prefixes_are_shared_within_a_key_and_a_salt_alone(chat_model: Path, key_file: Path) -> None:
    def cached(key: str, **body: object) -> int:
        reply = ask(live, key, prompt=[1] * 40, **body)
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    key_file.write_text('[a]\nkey = "a"\n[b]\nkey = "b"\n')
    with serving(new_engine(chat_model), api_key_file=str(key_file)) as live:
        assert [cached("a"), cached("a")] == [0, 32]
        assert [cached("b"), cached("b")] == [0, 32]
        assert [cached("a", cache_salt="x"), cached("a", cache_salt="x"), cached("a")] == [0, 32, 32]
        assert cached("b", cache_salt="x") == 0


def test_a_client_beside_a_flood_waits_for_one_turn(chat_model: Path, key_file: Path) -> None:
    """Ten requests of one key wait when another key's first one comes: it is admitted before nine of them."""
    key_file.write_text('[a]\nkey = "a"\n[b]\nkey = "b"\n')
    done: list[str] = []

    def finish(key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True}
        reply = httpx.post(f"{live.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)
        assert reply.status_code == 200
        done.append(key)

    with gated_serving(chat_model, api_key_file=str(key_file)) as (live, gate), ThreadPoolExecutor(16) as pool:
        flood = [pool.submit(finish, "a") for _ in range(12)]
        eventually(lambda: live.engine.num_unfinished == 12)
        flood.append(pool.submit(finish, "b"))
        eventually(lambda: live.engine.num_unfinished == 13)
        gate.open()
        for one in flood:
            one.result(PATIENCE_S)
    assert done.index("b") <= 6


def test_a_request_beside_one_of_many_prompts_of_the_same_key_waits_for_one_turn(chat_model: Path) -> None:
    done: list[int] = []

    def finish(num_prompts: int) -> None:
        body = {"prompt": [[1, 2, 3]] * num_prompts, "max_tokens": 8, "ignore_eos": True}
        assert httpx.post(f"{live.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200
        done.append(num_prompts)

    with gated_serving(chat_model) as (live, gate), ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(finish, 12)]
        eventually(lambda: live.engine.num_unfinished == 12)
        asked.append(pool.submit(finish, 1))
        eventually(lambda: live.engine.num_unfinished == 13)
        gate.open()
        for one in asked:
            one.result(PATIENCE_S)
    assert done == [1, 12]
    assert live.engine.stats().num_preemptions == 1
