"""A CPU expert thread that dies under a server: one request fails, the next one is served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from headrace.core.config import EngineConfig
from headrace.core.errors import WorkerLostError
from headrace.core.request import GenerationRequest, SamplingParams
from headrace.server.app import create_app
from headrace.server.client import Phase
from headrace.server.process import ProcessClient
from tests.fixtures.cpu_cases import needs_native
from tests.fixtures.expert_worker import DEADLY, expert_worker
from tests.fixtures.scripted import ByteFrontend
from tests.fixtures.toy import write_gpt_oss


def ask(name: str, last: int) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return GenerationRequest(name, (5, 9, last), sampling)


@needs_native
def test_one_request_fails_and_the_next_succeeds(tmp_path: Path):
    toy = write_gpt_oss(tmp_path / "toy").path

    async def tokens(client: ProcessClient, request: GenerationRequest) -> list[int]:
        return [t async for delta in client.generate(request) for t in delta.token_ids]

    async def test() -> None:
        client = ProcessClient(target=expert_worker)
        client.start(EngineConfig(model=str(toy)))
        try:
            await client.settled.wait()
            assert client.info is not None
            before = await tokens(client, ask("a", 11))
            with pytest.raises(WorkerLostError, match="experts on the CPU"):
                await tokens(client, ask("b", DEADLY))
            assert await tokens(client, ask("c", 11)) == before
            assert client.state.phase is Phase.READY
            await asyncio.sleep(0.6)  # the engine reports while it idles
            transport = httpx.ASGITransport(app=create_app(client, ByteFrontend()))
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
                body = {"model": client.info.model, "prompt": [5, 9, DEADLY], "max_tokens": 4}
                failed = await http.post("/v1/completions", json=body)
                assert failed.status_code == 503
                assert "again" in str(failed.json()["error"])
                served = await http.post("/v1/completions", json={**body, "prompt": [5, 9, 11]})
                assert served.status_code == 200, served.text
                metrics = (await http.get("/metrics")).text
            assert "headrace_expert_restarts_total 1.0" in metrics
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(test(), 60))
