"""``hexllm serve`` with a scripted engine in place of the engine process, for tests.

HEXLLM_FAKE_ENGINE holds JSON: ``start_error``, ``start_seconds``, ``die_seconds`` (after the first
request), ``delay`` (seconds a token), ``manifest`` (of the engine, else the server's own).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import types
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hexllm.core.errors import CheckpointError
from hexllm.core.plugins import load_plugins
from hexllm.engine.messages import EngineInfo, StartProgress
from tests.server.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from hexllm.engine.messages import GenerateRequest, RequestOutput

ORDERS = json.loads(os.environ.pop("HEXLLM_FAKE_ENGINE", "{}"))


class ScriptedStart(FakeEngine):
    def __init__(self, settings: Any) -> None:
        super().__init__([60, 61, 62, 63], delay=ORDERS.get("delay", 0.01), ready=False)
        manifest = load_plugins(settings.plugins).manifest()
        manifest = tuple(map(tuple, ORDERS.get("manifest", manifest)))
        self.ready_info = replace(self.ready_info, manifest=manifest)

    async def start(self) -> EngineInfo:
        self.progress = StartProgress("compiling", 1, 4)
        await asyncio.sleep(ORDERS.get("start_seconds", 0))
        if "start_error" in ORDERS:
            raise CheckpointError(ORDERS["start_error"])
        self.info = self.ready_info
        return self.info

    def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        if "die_seconds" in ORDERS:
            loop = asyncio.get_running_loop()
            loop.call_later(ORDERS["die_seconds"], self.die, "its process ended by signal 9")
        return super().generate(request)

    async def shutdown(self) -> None:
        print("engine shut down", flush=True)


if __name__ == "__main__":
    # As in production, where torch is not installed; importing it would take seconds, too.
    sys.modules["torch"] = None  # type: ignore[assignment]
    stand_in = types.ModuleType("hexllm.engine.process")
    stand_in.spawn_engine = ScriptedStart  # type: ignore[attr-defined]
    sys.modules["hexllm.engine.process"] = stand_in

    from hexllm.server.main import main

    sys.exit(main(sys.argv[1:]))
