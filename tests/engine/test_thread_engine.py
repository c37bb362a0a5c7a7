"""The engine behind an event loop: concurrent streams, early exits, a full queue, a drained shutdown."""

import asyncio
import contextlib

import pytest

from ridgeline.core.config import EngineConfig, ModelConfig, SchedulerConfig
from ridgeline.core.errors import OverloadedError
from ridgeline.core.params import SamplingParams
from ridgeline.engine.thread_engine import ThreadEngine


@pytest.fixture
def config(shared_data):
    return EngineConfig(
        model=ModelConfig(model=str(shared_data / "models/stories260K"), dtype="float32"),
        scheduler=SchedulerConfig(max_num_seqs=8),
        num_threads=1,
    )


@contextlib.asynccontextmanager
async def running(config):
    engine = ThreadEngine(config)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def request(engine, max_tokens=20, **options):
    return engine.engine.intake.request([1], SamplingParams(temperature=0, max_tokens=max_tokens, **options))


async def collect(engine, asked):
    return [token async for delta in engine.stream(asked) for token in delta.token_ids]


async def settled(engine):
    """Waits until the engine has nothing left, and returns its block counts."""
    for _ in range(1000):
        if not (engine.engine.loop.scheduler.running() or engine.engine.loop.scheduler.stats().num_waiting):
            return engine.engine.loop.stats().cache.groups[0]
        await asyncio.sleep(0.005)
    raise AssertionError("the engine does not come to rest")


def test_concurrent_streams_equal_one_alone_and_early_exits_free_their_blocks(config):
    async def scenario():
        async with running(config) as engine:
            alone = await collect(engine, request(engine))

            async def leave_early():
                stream = engine.stream(request(engine, 200))
                await anext(stream)
                await stream.aclose()

            completions = await asyncio.gather(
                *(collect(engine, request(engine)) for _ in range(6)), *(leave_early() for _ in range(6))
            )
            assert completions[:6] == [alone] * 6
            blocks = await settled(engine)
            assert blocks.used == 0
            assert engine.num_unfinished == 0

    asyncio.run(scenario())


def test_drain_finishes_what_runs_and_refuses_the_rest(config):
    async def scenario():
        async with running(config) as engine:
            running_stream = asyncio.create_task(collect(engine, request(engine, 50)))
            await asyncio.sleep(0.05)
            draining = asyncio.create_task(engine.drain(30))
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError):
                await collect(engine, request(engine))
            assert await draining
            assert len(await running_stream) == 50

    asyncio.run(scenario())


def test_a_deadline_ends_a_stream(config):
    async def scenario():
        async with running(config) as engine:
            asked = engine.engine.intake.request([1], SamplingParams(max_tokens=500, ignore_eos=True), deadline_s=0.05)
            deltas = [delta async for delta in engine.stream(asked)]
            assert deltas[-1].finish.reason == "deadline"
            assert (await settled(engine)).used == 0

    asyncio.run(scenario())


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(config):
    async def scenario():
        async with running(config) as engine:
            executor = engine.engine.executor
            collect_result, failures = executor.collect, iter([RuntimeError("broken kernel")])

            def collect_once_broken():
                result = collect_result()
                for failure in failures:
                    raise failure
                return result

            executor.collect = collect_once_broken
            deltas = [delta async for delta in engine.stream(request(engine))]
            assert deltas[-1].finish.reason == "error"
            assert "RuntimeError" in deltas[-1].finish.error
            assert len(await collect(engine, request(engine))) == 20

    asyncio.run(scenario())
