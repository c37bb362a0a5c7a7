"""The canary of rounded keys and values: what it measures, when it speaks, and that a server shows it."""

import logging
import math

import pytest
from live_server import LiveServer, eventually

from ridgeline.cli import main
from ridgeline.core.config import EngineConfig
from ridgeline.engine.thread_engine import ThreadEngine
from ridgeline.quality.canary import Sample, compared
from ridgeline.server.canary import FEWEST, LIMIT_BITS, Canary
from ridgeline.server.settings import ServerSettings
from ridgeline.weights.folder import ModelFolder

TEXT = "def read(path):\n    with open(path) as file:\n        return [line.strip() for line in file]\n" * 4


def test_coarser_numbers_cost_more():
    token_ids = ModelFolder.open("python-1m").tokenizer().encode(TEXT)
    found = {kind: compared(Sample("python-1m", {}, kind, token_ids)) for kind in ("auto", "int8", "int4")}
    assert found["auto"].kl_bits == 0 and found["auto"].num_tokens == len(token_ids) - 1
    assert 0 < 4 * found["int8"].kl_bits < found["int4"].kl_bits < 0.2
    assert found["int8"].top1_agreement > 0.9


def test_it_speaks_once_and_only_of_what_is_certain(caplog):
    canary = Canary(1, "python-1m", {}, "int4")
    assert math.isnan(canary.kl_bits) and math.isnan(canary.least_kl_bits)
    with caplog.at_level(logging.WARNING):
        for number in range(FEWEST):
            canary._take_in(4 * LIMIT_BITS if number % 4 == 0 else 0.0)  # its mean is at the limit
        assert canary.kl_bits == pytest.approx(LIMIT_BITS) and canary.least_kl_bits < LIMIT_BITS
        assert not caplog.records
        for _ in range(40):
            canary._take_in(2 * LIMIT_BITS)
    assert canary.least_kl_bits > LIMIT_BITS and canary.num_scored == FEWEST + 40
    (record,) = caplog.records
    assert "int4" in record.getMessage()


def test_a_server_shows_what_prompts_cost():
    """Every other prompt is scored; one that is too short says nothing."""
    engine = ThreadEngine(EngineConfig.of("python-1m", kv_dtype="int4", num_threads=1))
    live = LiveServer(engine, ServerSettings())
    try:
        canary = Canary(2, "python-1m", {}, "int4")
        live.server._service.watch_with(canary)
        for _ in range(2):
            live.complete(model="python-1m", prompt="x", max_tokens=1)
        assert canary._task is None
        live.complete(model="python-1m", prompt=TEXT, max_tokens=1)
        assert canary._task is None
        live.complete(model="python-1m", prompt=TEXT, max_tokens=1)
        eventually(lambda: live.metric("ridgeline_kv_canary_prompts") == 1)
        assert 0 < live.metric("ridgeline_kv_canary_kl_bits") < 0.2
    finally:
        live.close()


def test_exact_keys_and_values_need_none(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "python-1m", "--kv-canary", "10"])
    assert ended.value.code == 2 and "--kv-canary is for a --kv-dtype of int8" in capsys.readouterr().err
