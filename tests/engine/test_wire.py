"""Messages between a server and its engine process: whole, in order, and of the types that they claim."""

from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.params import (
    DiffusionParams,
    PoolingParams,
    SamplingParams,
    SpeculationParams,
    StructuredOutputsParams,
)
from ridgeline.core.step import TokenLogprob
from ridgeline.decoding.request import Request
from ridgeline.engine.journal import Journal
from ridgeline.engine.outputs import Finish, OutputDelta
from ridgeline.engine.process import wire
from ridgeline.engine.request import FinishReason, Timings

PARAMS = SamplingParams(
    stop=("a", "b"), logit_bias={3: 1.5}, seed=2**64 - 1, logprobs=3, speculation=SpeculationParams(),
    diffusion=DiffusionParams(steps=3), structured_outputs=StructuredOutputsParams(json={"type": ["null"]}),
)  # fmt: skip
REQUEST = Request(
    request_id="one", prompt_ids=[1, 2], params=PARAMS, arrival_s=1.5, seed=2**64 - 1, max_tokens=3,
    stop_ids=frozenset({4, 5}), priority=-1, background=True, deadline_s=9.5, client=7, call=3, adapter=1,
    pooling=PoolingParams(pooling="mean"), salt="s", shown_ids=frozenset({6}), prediction_ids=[8],
    length_penalty=0.5,
)  # fmt: skip


def cut(data: bytes, size: int):
    frames = wire.Frames()
    return [frame for at in range(0, len(data), size) for frame in frames.feed(data[at : at + size])]


def test_a_request_arrives_with_every_field_but_its_grammar() -> None:
    for field in fields(Request):
        assert field.name == "grammar" or getattr(REQUEST, field.name) not in (field.default, None), field.name
    (frame,) = cut(wire.encode(wire.Submit([REQUEST, replace(REQUEST, request_id="two")])), 10**6)
    one, two = wire.decode_to_engine(frame).requests
    assert one == REQUEST and two.request_id == "two"


def test_outputs_arrive_however_the_stream_is_cut() -> None:
    timings = Timings(queue_s=0.0, ttft_s=0.5, tpot_s=None, latency_s=1.0, num_preemptions=2)
    score = TokenLogprob(5, -0.5, 1, ((5, -0.5), (6, -1.5)))
    finish = Finish(reason=FinishReason.STOP, timings=timings, num_cached_tokens=3, stop_reason="b")
    deltas = [
        OutputDelta("one", 0, "tex\u00e9t", [np.int64(5)], [score], [score]),
        OutputDelta("one", 1, logprobs=[], prompt_logprobs=[], finish=finish),
    ]
    vector = OutputDelta("two", 0, vector_H=np.float32([0.5, -1.5]))
    data = wire.encode(wire.Outputs(deltas)) + wire.encode(wire.Outputs([vector]))
    for size in (1, 7, len(data)):
        first, second = map(wire.decode_from_engine, cut(data, size))
        assert first.deltas == deltas
        np.testing.assert_array_equal(second.deltas[0].vector_H, vector.vector_H)


def test_a_config_arrives() -> None:
    config = EngineConfig.of("python-1m", num_threads=2, adapters={"a": "b"}, kv_cache_bytes=2**40)
    (frame,) = cut(wire.encode(wire.Begin(config, "json", 20)), 5)
    assert wire.decode_to_engine(frame) == wire.Begin(config, "json", 20)


def test_a_journal_takes_the_records_of_another() -> None:
    theirs, ours = Journal(1, 16), Journal(1, 16)
    told = 0
    width = len(theirs.host.read()[1].dtype.names)
    for count in (3, 5000, 1, 4096):  # more than there is room for, too
        for number in range(count):
            theirs.host.append(*range(number, number + width))
        first, found = theirs.host.read(told)
        told = first + len(found)
        ours.host.take(first, found.tobytes())
        assert ours.host.num_written == theirs.host.num_written
        (one, records), (other, expected) = ours.host.read(), theirs.host.read()
        assert one == other and records.tolist() == expected.tolist()


@pytest.mark.parametrize("message", [["Submit", [[1]]], ["Begin", {}, 3], ["Nothing"], {"a": 1}, ["Abort", 5]])
def test_what_is_no_message_is_refused(message: object) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_engine(msgspec.msgpack.encode(message))


def test_a_frame_that_claims_too_much_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        wire.Frames().feed(wire.HEADER.pack(2**31) + b"x")
