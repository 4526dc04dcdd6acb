"""``serve``: the port, the engine's process, the signals, and the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

import uvicorn

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, HeadraceError, outcome_of
from headrace.server.app import create_app
from headrace.server.client import EngineState, Phase
from headrace.server.frontend import CheckpointFrontend, TextFrontend
from headrace.server.process import ProcessClient, WorkerMain, worker_main
from headrace.server.services import Services
from headrace.server.settings import ServerSettings

log = logging.getLogger(__name__)

R = TypeVar("R")

Progress = Callable[[str, float], None]  # (stage, fraction of it from 0 to 1)

# Cancelled streams end within a few messages; what is still open after this is a stuck socket.
_GRACE_S = 3
# Clients keep idle connections for 4 s (Node) to 90 s (Go) and are surprised when the server is the
# one that closes them: the next request then fails.
_IDLE_CONNECTION_S = 120
# How often a change of the loading stage is looked for, to print it.
_STAGE_POLL_S = 0.1


def resolve(model: str, progress: Progress) -> Path:
    """Return where the model's files are, after downloading them if they are not here."""
    from headrace.checkpoint.open import resolve_ref

    return resolve_ref(model, progress=progress)


@dataclass(frozen=True)
class Parts:
    """What ``serve`` puts together; tests put in others."""

    worker: WorkerMain = worker_main
    resolve: Callable[[str, Progress], Path] = resolve
    frontend: Callable[[str], TextFrontend] = CheckpointFrontend.load


def serve(
    config: EngineConfig,
    settings: ServerSettings | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    parts: Parts | None = None,
) -> int:
    """Serve ``config.model`` over HTTP until SIGINT or SIGTERM; return the process's exit code.

    The port is bound first: while the model loads, every route answers 503, and ``/health`` says
    how far it is. If loading fails, the reason goes to standard error and the code comes from
    ``core.errors``. An engine that dies later leaves the server up, answering 503, so that whoever
    watches ``/health`` decides; the code at the end then is that of the engine's error.

    Args:
        config: the engine's configuration; ``model`` may need a download.
        settings: the front end's; without ``model_ids`` the served name is derived from the model.
        host: address to listen on.
        port: 0 takes a free one.
        parts: what runs the engine and reads the text files; None takes the real ones.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    settings = settings or ServerSettings()
    if not settings.model_ids:
        settings = replace(settings, model_ids=(served_name(config.model),))
    with bind(host, port) as sock:
        return asyncio.run(_Run(config, settings, sock, parts or Parts()).until_stopped())


def served_name(model: str) -> str:
    """Return the public name of a model: a path's last part without ``.gguf``, else as given."""
    path = Path(model)
    if not path.exists():
        return model
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to ``host`` and ``port``.

    Raises:
        ConfigError: the host is unknown, or the port is taken or not allowed.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"--host {host} cannot be resolved: {error.strerror}",
            hint="use 127.0.0.1 for this machine only, 0.0.0.0 for all its addresses",
            param="--host",
        ) from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen()
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            hint = f"another program listens there; stop it, or choose a --port other than {port}"
        elif error.errno == errno.EACCES:
            hint = "ports below 1024 need more rights; choose a --port above"
        else:
            hint = "choose an address of this machine with --host"
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}", hint=hint, param="--port"
        ) from None
    return sock


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which end the process by the signal they caught."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Run:
    """One run of the server, from bound socket to exit code."""

    def __init__(
        self,
        config: EngineConfig,
        settings: ServerSettings,
        sock: socket.socket,
        parts: Parts,
    ) -> None:
        self.parts = parts
        self.config = config
        self.settings = settings
        self.sock = sock
        self.client = ProcessClient(target=parts.worker)
        app = create_app(self.client, None, settings)
        self.services: Services = app.state.services
        self.http = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=_IDLE_CONNECTION_S,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )

    async def until_stopped(self) -> int:
        stop = asyncio.Event()
        for signum in (signal.SIGINT, signal.SIGTERM):
            _on_signal(signum, stop)
        stopped = asyncio.create_task(stop.wait())
        http = asyncio.create_task(self.http.serve(sockets=[self.sock]))
        loading = asyncio.create_task(self._load())
        code = 0
        try:
            await asyncio.wait({stopped, http, loading}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                self._say(f"{self.settings.model_ids[0]} is ready: {self.url}/v1")
                await asyncio.wait({stopped, http}, return_when=asyncio.FIRST_COMPLETED)
            code = self._exit_code()
        except HeadraceError as error:
            self._say(f"error: {error}")
            code = outcome_of(error).exit_code
        finally:
            self.http.should_exit = True
            for task in (loading, stopped):
                task.cancel()
            await self.client.close()
            await http
        return code

    @property
    def url(self) -> str:
        host, port = self.sock.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _load(self) -> None:
        """Return when requests are served.

        Raises:
            HeadraceError: the model cannot be loaded.
        """
        loop = asyncio.get_running_loop()

        def progress(stage: str, fraction: float) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self.client.progress, stage, fraction)

        teller = asyncio.create_task(self._tell_stages())
        try:
            # One download for both processes: not the same files twice, side by side.
            path = str(await _in_daemon_thread(self.parts.resolve, self.config.model, progress))
            self.client.start(replace(self.config, model=path))
            self.services.frontend = await _in_daemon_thread(self.parts.frontend, path)
            await self.client.settled.wait()
        finally:
            teller.cancel()
        if self.client.state.phase is Phase.DEAD:
            raise _reason(self.client.state)

    async def _tell_stages(self) -> None:
        told = ""
        while True:
            stage = self.client.state.stage
            if stage != told:
                told = stage
                self._say(f"loading {self.settings.model_ids[0]}: {stage}")
            await asyncio.sleep(_STAGE_POLL_S)

    def _exit_code(self) -> int:
        error = self.client.state.error
        return 0 if error is None else outcome_of(error).exit_code

    def _say(self, line: str) -> None:
        print(f"headrace: {line}", file=sys.stderr, flush=True)


def _reason(state: EngineState) -> HeadraceError:
    assert state.error is not None, "a dead engine has a reason"
    return state.error


def _on_signal(signum: signal.Signals, stop: asyncio.Event) -> None:
    """Set ``stop`` when the signal comes; where the loop cannot, by a plain handler (Windows)."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signum, stop.set)
    except NotImplementedError:

        def handler(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(stop.set)

        signal.signal(signum, handler)


async def _in_daemon_thread(call: Callable[..., R], *args: Any) -> R:
    """Return ``call(*args)``; a wait given up leaves the thread, which dies with the process.

    The loop's own thread pool would be waited for at exit: minutes, in the middle of a download.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def settle(result: R | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("R", result))

    def work() -> None:
        result, error = None, None
        try:
            result = call(*args)
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True).start()
    return await future
