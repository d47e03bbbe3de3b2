"""``hexllm serve``: one process for HTTP, one for the engine, and an end to both.

The socket is open from the start, so that liveness probes see a process that is alive; ``/ping``
turns 200 once the model answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

from hexllm.core.errors import ConfigError, EngineDeadError, HexllmError
from hexllm.core.logs import configure_logging
from hexllm.core.plugins import load_plugins
from hexllm.core.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from hexllm.core.plugins import Plugins
    from hexllm.core.settings import Settings
    from hexllm.engine.client import EngineClient
    from hexllm.server.state import ServerState

logger = logging.getLogger(__name__)

#: How long open requests may take to write their error, in seconds.
_ERROR_SECONDS = 1
#: Longer than any load balancer of Google's keeps an idle connection, so that it closes first.
_KEEP_ALIVE_SECONDS = 620


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal or the engine's end.

    Args:
        argv: Flags; those of the process when None.

    Returns:
        0 after a signal to stop, 1 when the server could not start or its engine died, 2 for
        settings that cannot be used.
    """
    try:
        settings = load_settings(argv)
        configure_logging(settings, "server")
        plugins = load_plugins(settings.plugins)
        plugins.verify_options(settings.options)
    except HexllmError as error:
        return _complain(error, 2 if isinstance(error, ConfigError) else 1)
    try:
        plugins.notify("hexllm_configure", settings=settings, process="server")
        listener = open_listener(settings.host, settings.port)
        with listener:
            return _run(settings, plugins, listener)
    except HexllmError as error:
        return _complain(error, 1)


def _complain(error: HexllmError, status: int) -> int:
    print(f"hexllm: {error}", file=sys.stderr)
    return status


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket bound to ``host`` and ``port`` (0 for a free one).

    Raises:
        ConfigError: The port is in use, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host={host} is not an address to listen on: {error}.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} is in use by another program. Stop that one, or choose another "
                f"port with --port."
            ) from error
        raise ConfigError(f"Cannot listen on {host}, port {port}: {error.strerror}.") from error
    return listener


def _run(settings: Settings, plugins: Plugins, listener: socket.socket) -> int:
    from hexllm.engine.process import spawn_engine

    client = spawn_engine(settings)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(serve(settings, plugins, client, listener))


def _loop_factory() -> Any:
    import uvicorn

    return uvicorn.Config(
        app="", log_config=None
    ).get_loop_factory()  # uvloop's where it is installed


async def serve(
    settings: Settings, plugins: Plugins, client: EngineClient, listener: socket.socket
) -> int:
    """Serve on ``listener`` with ``client``, which is not started yet.

    Returns:
        0 after a signal to stop, 1 when the engine died.

    Raises:
        HexllmError: The engine could not start.
    """
    import uvicorn

    from hexllm.server.app import create_app
    from hexllm.server.startup import EngineStatsNotifier, start_engine

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            # Uvicorn would raise the signal again at the end, and the exit status would be its.
            yield

    app = create_app(settings, client, plugins=plugins)
    state = app.state.server
    server = Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=settings.log_level == "DEBUG",
            lifespan="off",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_ERROR_SECONDS,
        )
    )
    stopped, hurried, failed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def stop() -> None:
        if stopped.is_set():  # the second signal does not wait
            server.force_exit = True
            hurried.set()
        state.is_stopping = True
        stopped.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    client.on_failure = lambda _reason: failed.set()
    client.on_stats = EngineStatsNotifier(state)
    client.on_steps = state.metrics.observe_steps

    http = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(start_engine(state, plugins))
    stopping = asyncio.create_task(stopped.wait())
    failing = asyncio.create_task(failed.wait())
    try:
        await asyncio.wait((http, starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            info = starting.result()
            logger.info(
                "Serving %s (%s, %s, %s): %d KV blocks of %d tokens, at most %d tokens a request, "
                "on http://%s:%d",
                *(settings.served_model_name, info.family, info.dtype, info.platform),
                *(info.num_blocks, info.block_size, info.max_model_len),
                *listener.getsockname()[:2],
            )
            await asyncio.wait((http, stopping, failing), return_when=asyncio.FIRST_COMPLETED)
        if stopped.is_set():
            await _drain(state, settings.drain_seconds, hurried, failed)
            if client.failure is None:
                return 0
        if failed.is_set() or client.failure is not None:
            raise EngineDeadError(f"The engine has died: {client.failure}")
        http.result()  # the HTTP server ended by itself: its error, if it had one
        return 1
    finally:
        state.is_stopping = True
        server.should_exit = True
        for task in (starting, stopping, failing):
            task.cancel()
        await asyncio.gather(http, starting, stopping, failing, return_exceptions=True)
        await client.shutdown()
        state.notifier.close()


async def _drain(
    state: ServerState, seconds: float, hurried: asyncio.Event, failed: asyncio.Event
) -> None:
    """Let open requests finish, and end with an error what is not finished in time.

    The socket stays open meanwhile: a probe must see a server that is alive and not ready.
    """
    from hexllm.server.errors import DrainedError

    logger.info("Stopping: open requests have %g s to finish.", seconds)
    waiting = [
        asyncio.ensure_future(event)
        for event in (state.exchanges.wait_for_none(), hurried.wait(), failed.wait())
    ]
    await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    state.admission.close(DrainedError(seconds))
