"""A case of the signals, as the command makes it, with few requests."""

import argparse

from benchmarks import signals


def test_a_drain_as_the_command_sees_it() -> None:
    options = argparse.Namespace(model="python-1m", streams=4, whole=2, only=["drained"])
    (case,) = signals.measure(options)
    assert (case.ends, case.exit_code) == ({"whole": 6}, 0)
    assert (case.told["new"], case.told["new_closes"], case.told["health"]) == ("503", "True", 200)


def test_how_a_response_ended() -> None:
    stream = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    ends = {
        b'HTTP/1.1 200 OK\r\n\r\n{"text": "a"}': "whole",
        b'HTTP/1.1 200 OK\r\n\r\n{"text": "a': "cut off",
        stream + b"data: {}\n\ndata: [DONE]\n\n": "whole",
        stream + b"data: {}": "cut off",
        b"": "cut off",
        stream + b'data: {}\n\nevent: error\ndata: {"error": {}}\n\n': "error event",
        b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n\r\n{}": "503",
        b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}": "503 without Retry-After",
        b"HTTP/1.1 500 Internal Server Error\r\n\r\n{}": "500",
    }
    assert {reply: signals.end_of(reply) for reply in ends} == ends
