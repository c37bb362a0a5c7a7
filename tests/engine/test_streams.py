"""Open streams: who still computes a request, whatever its reader has read of it."""

import asyncio
from collections.abc import AsyncGenerator
from itertools import pairwise

import pytest

from ridgeline.core.errors import OverloadedError
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import TokenLogprob
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


def never(request_id: str, held: bool) -> None:
    raise AssertionError(f"{request_id} is held")


def test_a_reader_that_is_slow_keeps_nothing_with_the_engine() -> None:
    """Of four requests, all of which have readers that read no more: one has ended, one is aborted by the end."""

    async def scenario() -> None:
        aborted: list[str] = []
        streams = OpenStreams(lambda requests: None, aborted.append, never, lambda: True)
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


TOP = TokenLogprob(1, -1.0, 1, ((1, -1.0),) * 20)


@pytest.mark.parametrize("logprobs", [(), [TOP]])
def test_who_falls_behind_is_held_and_goes_on_when_all_is_read(logprobs: list[TokenLogprob]) -> None:
    """Both requests of one reader, and nobody else's; as much waits for it as is worth about 64 KiB an output."""

    async def scenario() -> int:
        told: list[tuple[str, bool]] = []
        streams = OpenStreams(lambda requests: None, lambda name: None, lambda *told_: told.append(told_), lambda: True)
        slow, quick = streams.read(request("slow"), request("slower")), streams.read(request("quick"))
        reading = asyncio.ensure_future(drained(quick))
        first = asyncio.ensure_future(anext(slow))
        await asyncio.sleep(0)
        count = 0
        while not told:
            count += 1
            streams.dispatch([OutputDelta(name, 0, "a", [1], logprobs) for name in ("slow", "slower", "quick")])
            await asyncio.sleep(0)
        assert sorted(told) == [("slow", True), ("slower", True)]
        streams.dispatch([OutputDelta("slower", 0, "a", [1], logprobs)])  # a step that was under way
        await first
        for _ in range(2 * count):
            assert len(told) == 2
            await anext(slow)
        assert sorted(told[2:]) == [("slow", False), ("slower", False)]
        streams.dispatch([OutputDelta(name, 0, finish=END) for name in ("slow", "slower", "quick")])
        await drained(slow)
        await reading
        assert len(told) == 4 and len(streams) == 0
        return count

    count = asyncio.run(scenario())
    assert 2**16 <= count * (256 + 21 * 128 * len(logprobs)) < 2**16 + 3000


async def drained(stream: AsyncGenerator[OutputDelta, None]) -> int:
    return len([delta async for delta in stream])


@pytest.mark.parametrize("logprobs", [(), [TOP] * 24])
def test_a_reader_of_whole_outputs_is_woken_for_several_deltas_and_for_ends(logprobs: list[TokenLogprob]) -> None:
    """Before it would be held: what it is not woken for is nothing that it waits for."""

    async def scenario() -> list[int]:
        streams = OpenStreams(lambda requests: None, lambda name: None, never, lambda: True)
        read, counts = list[OutputDelta](), list[int]()

        async def reading() -> None:
            async for delta in streams.read(request("whole"), request("other"), whole=True):
                read.append(delta)

        task = asyncio.ensure_future(reading())
        await asyncio.sleep(0)
        ends = [None] * 10 + [END] + [None] * 2 + [END]
        for number, end in enumerate(ends):
            streams.dispatch([OutputDelta("other" if number < 11 else "whole", 0, "a", [1], logprobs, finish=end)])
            await asyncio.sleep(0)
            counts.append(len(read))
        await task
        assert all(a.came_s < b.came_s for a, b in pairwise(read))
        return counts

    by_number, by_size = [0] * 7 + [8] * 3 + [11] * 3 + [14], [0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 11, 11, 11, 14]
    assert asyncio.run(scenario()) == (by_size if logprobs else by_number)


@pytest.mark.parametrize("whole", [False, True])
def test_a_reader_of_everything_is_never_held(whole: bool) -> None:
    """However much comes at once: it reads all before anybody else has a turn."""

    async def scenario() -> None:
        streams = OpenStreams(lambda requests: None, lambda name: None, never, lambda: True)
        reading = asyncio.ensure_future(drained(streams.read(request("whole"), whole=whole)))
        await asyncio.sleep(0)
        for _ in range(20):
            for _ in range(100):
                streams.dispatch([OutputDelta("whole", 0, "a", [1], [TOP])])
            await asyncio.sleep(0)
        streams.dispatch([OutputDelta("whole", 0, finish=END)])
        assert await reading == 2001

    asyncio.run(scenario())
