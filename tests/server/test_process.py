"""The engine in its own process: messages, cancellation, and every way to die."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.core.config import EngineConfig
from headrace.core.errors import CheckpointError, EngineDeadError, EngineLoadingError, RequestError
from headrace.core.request import GenerationRequest, SamplingParams
from headrace.server.client import Phase
from headrace.server.process import ProcessClient
from tests.fixtures.fake_worker import fake_worker


@asynccontextmanager
async def engine(mode: str = "good") -> AsyncGenerator[ProcessClient, None]:
    client = ProcessClient(target=fake_worker)
    client.start(EngineConfig(model=mode))
    try:
        yield client
    finally:
        await client.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 30)

    asyncio.run(limited())


def ask(end: str = "x", name: str = "r1") -> GenerationRequest:
    return GenerationRequest(name, (1, ord(end)))


async def text_of(client: ProcessClient, request: GenerationRequest) -> str:
    return "".join([d.text async for d in client.generate(request)])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_requests_side_by_side_and_cancel():
    async def test() -> None:
        async with engine() as client:
            with pytest.raises(EngineLoadingError):
                await text_of(client, ask())
            await client.settled.wait()
            assert client.state.phase is Phase.READY
            assert client.info is not None
            assert client.info.context == 64
            texts = await asyncio.gather(*(text_of(client, ask(name=f"r{i}")) for i in range(8)))
            assert texts == ["one two three"] * 8

            waiting = client.generate(ask("w", "w1"))
            assert (await anext(waiting)).text == "one "
            await until(lambda: client.snapshot.running == 1)
            await waiting.aclose()
            await until(lambda: client.snapshot.running == 0)
            assert client.snapshot.requests_aborted_total == 1

            with pytest.raises(RequestError) as raised:
                await text_of(client, ask("f", "f1"))
            assert (raised.value.param, raised.value.hint) == ("n", "do")
        assert client.state.phase is Phase.DEAD

    run(test)


def test_b120_a_killed_engine_fails_every_open_request():
    async def test() -> None:
        async with engine() as client:
            await client.settled.wait()
            open_requests = [
                asyncio.create_task(text_of(client, ask("w", f"w{i}"))) for i in range(3)
            ]
            await until(lambda: client.snapshot.running == 3)
            start = time.monotonic()
            results = await asyncio.gather(
                *open_requests, text_of(client, ask("k", "k1")), return_exceptions=True
            )
            assert time.monotonic() - start < 5
            assert all(isinstance(r, EngineDeadError) for r in results)
            assert "SIGKILL" in str(results[0])
            assert client.state.phase is Phase.DEAD
            with pytest.raises(EngineDeadError):  # later ones do not hang either
                await text_of(client, ask(name="later"))

    run(test)


def test_b120_a_stuck_engine_is_told_from_an_idle_one_and_may_go_on():
    async def test() -> None:
        async with engine() as client:
            await client.settled.wait()
            assert await text_of(client, ask()) == "one two three"
            await asyncio.sleep(0.1)
            assert client.silent_s == 0  # it owes nobody anything

            hangs = client.generate(ask("s", "s1"))
            first = asyncio.ensure_future(anext(hangs))
            await until(lambda: client.silent_s > 0.3)
            first.cancel()  # who gives up does not make it well
            await asyncio.wait({first})
            await hangs.aclose()
            waiting = asyncio.create_task(text_of(client, ask(name="r2")))
            await until(lambda: client.silent_s > 0.5)
            assert client.state.phase is Phase.READY

            assert client.pid is not None
            os.kill(client.pid, signal.SIGCONT)
            assert await waiting == "one two three"
            await until(lambda: client.silent_s == 0)

    run(test)


def toy_worker(config: EngineConfig, commands: Any, events: Any) -> None:
    """The engine's own loop, of a toy model."""
    from headrace.engine.worker import serve
    from tests.fixtures.toy_engine import toy_engine

    serve(toy_engine(), commands, events)


def test_who_leaves_an_answer_that_has_ended_does_not_make_an_idle_engine_stuck():
    async def test() -> None:
        client = ProcessClient(target=toy_worker)
        client.start(EngineConfig(model="toy"))
        try:
            await client.settled.wait()
            sampling = SamplingParams(max_tokens=3, ignore_eos=True)
            answer = client.generate(GenerationRequest("a", (1, 2), sampling))
            await anext(answer)
            # The engine has ended the request, and its last words wait for whoever reads them.
            await until(lambda: client.snapshot.requests_finished == {"length": 1})
            await answer.aclose()
            await until(lambda: client.silent_s == 0)
        finally:
            await client.close()

    run(test)


@pytest.mark.parametrize(
    ("mode", "error", "text"),
    [("fatal", CheckpointError, "shard 2 is cut short"), ("dies", EngineDeadError, "exit code 7")],
)
def test_loading_failures_have_their_reason(mode: str, error: type[Exception], text: str):
    async def test() -> None:
        async with engine(mode) as client:
            await client.settled.wait()
            assert client.state.phase is Phase.DEAD
            assert isinstance(client.state.error, error)
            assert text in str(client.state.error)

    run(test)


def test_close_ends_open_requests_and_the_process():
    async def test() -> None:
        async with engine() as client:
            await client.settled.wait()
            waiting = asyncio.create_task(text_of(client, ask("w")))
            await until(lambda: client.snapshot.running == 1)
            await client.close()
            with pytest.raises(EngineDeadError, match="shutting down"):
                await waiting

    run(test)


def test_an_engine_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.server.process._SHUTDOWN_S", 0.2)

    async def test() -> None:
        async with engine("stubborn") as client:
            await client.settled.wait()
            pid = client.pid
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIG_DFL)

    run(test)
