"""Open streams: who still computes a request, whatever its reader has read of it."""

import asyncio

import pytest

from ridgeline.core.errors import OverloadedError
from ridgeline.core.params import SamplingParams
from ridgeline.decoding.request import Request
from ridgeline.engine.outputs import Finish, OutputDelta
from ridgeline.engine.request import FinishReason, Timings
from ridgeline.engine.streams import OpenStreams

END = Finish(
    reason=FinishReason.LENGTH,
    timings=Timings(queue_s=0.0, ttft_s=0.0, tpot_s=None, latency_s=0.0, num_preemptions=0),
    num_cached_tokens=0,
)


def request(name: str, n: int = 1) -> Request:
    params = SamplingParams(n=n)
    return Request(
        request_id=name, prompt_ids=(1,), params=params, arrival_s=0.0, seed=0, max_tokens=1, stop_ids=frozenset()
    )


def test_a_reader_that_is_slow_keeps_nothing_with_the_engine() -> None:
    """Of four requests, all of which have readers that read no more: one has ended, one is aborted by the end."""

    async def scenario() -> None:
        aborted: list[str] = []
        streams = OpenStreams(lambda requests: None, aborted.append, lambda: True)
        names = ("ended", "half", "left", "open")
        readers = {name: streams.read(request(name, 2)) for name in names}
        for name in names:
            streams.dispatch([])
            first = asyncio.ensure_future(anext(readers[name]))
            await asyncio.sleep(0)
            streams.dispatch([OutputDelta(name, 0, "a")])
            await first
        streams.dispatch([OutputDelta("ended", index, finish=END) for index in range(2)])
        streams.dispatch([OutputDelta("half", 0, finish=END)])
        assert {each.request_id for each in streams.requests()} == {"half", "left", "open"} and len(streams) == 4
        await readers["left"].aclose()
        assert aborted == ["left"] and len(streams) == 3
        streams.close()  # the engine has died
        assert streams.requests() == []
        assert [delta.finish async for delta in readers["ended"]] == [END, END], "all of it had come"
        for name in ("half", "open"):
            with pytest.raises(OverloadedError):
                _ = [delta async for delta in readers[name]]
        assert aborted == ["left"] and len(streams) == 0

    asyncio.run(scenario())
