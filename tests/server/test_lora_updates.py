"""Adapters loaded and unloaded while a server runs: each answers as one that was there from the start."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from live_server import PATIENCE_S, LiveServer, eventually, serving
from safetensors.numpy import load_file, save_file

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.engine.process.client import ProcessEngine
from ridgeline.engine.thread_engine import ThreadEngine

NAME = "base_model.model.model.layers.{}.{}.lora_{}.weight"
SHAPES = {"self_attn.q_proj": (128, 128), "self_attn.v_proj": (64, 128), "mlp.down_proj": (128, 384)}
ASKED = {"prompt": "import os\nimport ", "max_tokens": 12, "temperature": 0, "logprobs": 0}
LONG = {"prompt": "import os\n", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
ENGINES = [ThreadEngine, ProcessEngine]
KEYS = '[guest]\nkey = "guest-key"\n'


def write_adapter(folder: Path, seed: int, rank: int = 4) -> str:
    """Write an adapter of python-1m in PEFT's format; return its folder."""
    random, tensors = np.random.default_rng(seed), {}
    for layer in range(3):
        for module, (num_outputs, num_inputs) in SHAPES.items():
            for factor, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
                tensors[NAME.format(layer, module, factor)] = random.normal(0, 0.2, shape).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def config_of(**options: object) -> EngineConfig:
    return EngineConfig.of("python-1m", dtype="float32", num_threads=1, max_model_len=512, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three adapters of unequal ranks."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(root / name, seed, rank)
        for seed, (name, rank) in enumerate({"a": 4, "b": 8, "c": 2}.items())
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[str, tuple]:
    """What each answers where all were there from the start."""
    with serving(ThreadEngine(config_of(adapters=folders))) as server:
        told = {name: answer(server, name) for name in (*folders, "python-1m")}
    return {name: (text, pytest.approx(logprobs, abs=1e-4)) for name, (text, logprobs) in told.items()}


@pytest.fixture(params=ENGINES)
def live(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    with serving(request.param(config_of(max_loras=2)), shutdown_timeout_s=5.0) as server:
        yield server


def load(server: LiveServer, name: str, folder: str, **more: object) -> httpx.Response:
    return server.post("load_lora_adapter", lora_name=name, lora_path=folder, **more)


def unload(server: LiveServer, name: str) -> httpx.Response:
    return server.post("unload_lora_adapter", lora_name=name)


def answer(server: LiveServer, name: str) -> tuple:
    choice = server.complete(model=name, **ASKED)["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def names(server: LiveServer) -> set[str]:
    return {model["id"] for model in server.client.get("/v1/models").json()["data"]}


def assert_refused(response: httpx.Response, status: int, words: str, param: str | None = None) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), response.text
    assert words in error["message"]


def test_loaded_adapters_answer_as_those_of_the_start(live: LiveServer, folders, expected):
    assert len({text for text, _ in expected.values()}) == 4
    for name in ("a", "b"):
        done = load(live, name, folders[name])
        assert (done.status_code, done.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    assert names(live) == {"python-1m", "a", "b"}
    with ThreadPoolExecutor(6) as threads:
        asked = ["a", "b", "python-1m"] * 2
        assert list(threads.map(lambda name: answer(live, name), asked)) == [expected[name] for name in asked]
    done = unload(live, "a")
    assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'a' removed successfully.")
    assert_refused(live.post("completions", model="a", **ASKED), 404, "no model 'a' is served", "model")
    load(live, "c", folders["c"]).raise_for_status()  # of a smaller rank, where a was
    assert [answer(live, name) for name in ("c", "b", "python-1m")] == [expected[n] for n in ("c", "b", "python-1m")]


def test_another_adapter_of_the_same_name_finds_no_prefix_of_the_first(live: LiveServer, folders, expected):
    load(live, "x", folders["a"]).raise_for_status()
    assert [answer(live, "x"), answer(live, "x")] == [expected["a"]] * 2
    assert_refused(load(live, "x", folders["b"]), 400, "'x' is loaded", "lora_name")
    load(live, "x", folders["b"], load_inplace=True).raise_for_status()
    assert answer(live, "x") == expected["b"]
    unload(live, "x").raise_for_status()
    load(live, "x", folders["c"]).raise_for_status()
    assert answer(live, "x") == expected["c"]


def test_open_requests_end_with_the_adapter_that_they_began_with(live: LiveServer, folders):
    load(live, "a", folders["a"]).raise_for_status()
    whole = live.complete(model="a", **LONG)["choices"][0]["text"]
    with live.client.stream("POST", "/v1/completions", json={"model": "a", "stream": True, **LONG}) as response:
        lines = response.iter_lines()
        pieces = [text_of(next(line for line in lines if line.startswith("data: ")))]
        unload(live, "a").raise_for_status()
        load(live, "b", folders["b"]).raise_for_status()  # the other place
        refused = load(live, "c", folders["c"])
        pieces += [text_of(line) for line in lines if line.startswith("data: {")]
    assert "".join(pieces) == whole
    if refused.status_code != 200:  # unless the stream had ended by then
        assert_refused(refused, 503, "open requests use the adapters that were unloaded")
        eventually(lambda: load(live, "c", folders["c"]).status_code == 200)


def text_of(line: str) -> str:
    return json.loads(line.removeprefix("data: "))["choices"][0]["text"]


def _without_a_file(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def _with_nan(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = np.nan
    save_file(tensors, folder / "adapter_model.safetensors")


def _cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (_without_a_file, "has no adapter_model.safetensors"),
    (_with_nan, "has NaN or infinity"),
    (_cut, "adapter_model.safetensors"),
    (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json"),
    (lambda folder: write_adapter(folder, 9, rank=17), "of rank 1 to 16"),
]


def test_a_bad_folder_is_one_clear_error_and_changes_nothing(live: LiveServer, folders, expected, tmp_path: Path):
    load(live, "a", folders["a"]).raise_for_status()
    for number, (damage, words) in enumerate(BROKEN):
        folder = tmp_path / str(number)
        write_adapter(folder, 5)
        damage(folder)
        assert_refused(load(live, "bad", str(folder)), 400, words, "lora_path")
        assert_refused(load(live, "a", str(folder), load_inplace=True), 400, words, "lora_path")
    assert_refused(load(live, "bad", "/nowhere"), 400, "'/nowhere' is not a folder", "lora_path")
    assert_refused(load(live, "python-1m", folders["a"]), 400, "the model's own", "lora_name")
    assert_refused(load(live, " ", folders["a"]), 400, "is empty", "lora_name")
    assert_refused(unload(live, "bad"), 404, "no adapter 'bad' is loaded; there is a", "model")
    assert names(live) == {"python-1m", "a"} and answer(live, "a") == expected["a"]
    load(live, "b", folders["b"]).raise_for_status()
    assert_refused(load(live, "c", folders["c"]), 400, "max_loras is 2, and as many are loaded", "lora_name")


def test_another_engine_has_what_was_loaded(folders, expected, tmp_path: Path):
    gone = write_adapter(tmp_path / "gone", 7)
    with serving(ProcessEngine(config_of(max_loras=3, adapters={"a": folders["a"]}))) as live:
        load(live, "gone", gone).raise_for_status()
        load(live, "b", folders["b"]).raise_for_status()
        unload(live, "a").raise_for_status()
        (tmp_path / "gone").rename(tmp_path / "elsewhere")
        os.kill(live.engine.process_id, signal.SIGKILL)
        eventually(lambda: live.engine.stats().num_restarts == 1 and live.engine.accepting)
        assert names(live) == {"python-1m", "b"}
        assert answer(live, "b") == expected["b"]
        load(live, "c", folders["c"]).raise_for_status()
        assert [answer(live, name) for name in ("b", "c")] == [expected["b"], expected["c"]]


def test_they_are_the_operators_and_there_only_where_asked_for(folders, tmp_path: Path):
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    body = {"lora_name": "a", "lora_path": folders["a"]}
    with serving(ThreadEngine(config_of(max_loras=1)), api_key="root", api_key_file=str(keys)) as live:
        for path in ("load_lora_adapter", "unload_lora_adapter"):
            asked = body if path.startswith("load") else {"lora_name": "a"}
            statuses = [
                httpx.post(f"{live.url}/v1/{path}", json=asked, headers=headers, timeout=PATIENCE_S).status_code
                for headers in ({}, {"Authorization": "Bearer guest-key"}, {"Authorization": "Bearer root"})
            ]
            assert statuses == [401, 403, 200]
    with serving(ThreadEngine(config_of(adapters={"a": folders["a"]}))) as live:
        assert load(live, "b", folders["b"]).status_code == 404
        assert "/v1/load_lora_adapter" not in live.client.get("/openapi.json").json()["paths"]


def test_more_adapters_than_places_are_refused(folders):
    with pytest.raises(ConfigError, match="2 adapters are given, and max_loras is 1"):
        config_of(max_loras=1, adapters={"a": folders["a"], "b": folders["b"]})
