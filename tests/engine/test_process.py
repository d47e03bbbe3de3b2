"""The engine process as the server sees it: ready, streaming, aborting, dying, ending."""

import asyncio
import os
import signal

import pytest

from hexllm.core.errors import EngineDeadError, UnsupportedConfigError
from hexllm.engine import process
from hexllm.engine.client import EngineClient
from hexllm.engine.process import spawn_engine
from tests.engine.tiny import make_settings, request, write_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


def fast_settings(directory, *flags):
    return make_settings(directory, "--no-warmup", *flags)


async def collect(client, message):
    return [output async for output in client.generate(message)]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_whole_life(directory):
    async def live():
        client = spawn_engine(fast_settings(directory))
        assert isinstance(client, EngineClient)
        assert not client.is_ready
        seen = []
        client.on_stats = seen.append
        info = await client.start()
        assert client.is_ready
        assert (info.family, info.platform, info.dtype) == ("llama", "cpu", "float32")
        assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (256, 97, (5,))
        alone = await collect(client, request("0", [1, 2, 3], 6, eos=()))
        assert [len(output.token_ids) for output in alone] == [1] * 6
        assert [output.finish_reason for output in alone] == [None] * 5 + ["length"]
        together = await asyncio.gather(
            *(collect(client, request(str(i), [1, 2, 3], 6, eos=())) for i in range(1, 5))
        )
        for outputs in together:
            assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
        # A reader that goes away frees the request's blocks.
        stream = client.generate(request("left", [4] * 60, 190, eos=()))
        await anext(stream)
        assert client.stats.num_free_blocks < info.num_blocks
        await stream.aclose()
        for _ in range(200):
            if client.stats.num_free_blocks == info.num_blocks:
                break
            await asyncio.sleep(0.02)
        assert client.stats.num_free_blocks == info.num_blocks
        assert client.stats.num_running == 0
        # An abort by name ends the iterator.
        stream = client.generate(request("named", [4] * 60, 190, eos=()))
        await anext(stream)
        client.abort("named")
        last = [output async for output in stream][-1]
        assert last.finish_reason == "abort"
        assert seen
        pid = client.pid
        await client.shutdown()
        assert not is_running(pid)
        assert not client.is_ready
        with pytest.raises(EngineDeadError, match="stopping"):
            await collect(client, request("late", [1]))

    asyncio.run(live())


def test_a_killed_engine_ends_every_open_request_at_once(directory):
    async def live():
        client = spawn_engine(fast_settings(directory))
        failures = []
        client.on_failure = failures.append
        await client.start()
        streams = [client.generate(request(str(i), [7] * 20, 200, eos=())) for i in range(3)]
        for stream in streams:
            await anext(stream)
        os.kill(client.pid, signal.SIGKILL)

        async def rest(stream):
            async for _ in stream:
                pass

        for stream in streams:
            with pytest.raises(EngineDeadError, match="ended by signal 9"):
                await asyncio.wait_for(rest(stream), 10)
        assert failures == ["its process ended by signal 9"]
        assert not client.is_ready
        with pytest.raises(EngineDeadError, match="has died"):
            await collect(client, request("late", [1]))
        await client.shutdown()

    asyncio.run(live())


async def eventually(condition, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def test_a_stopped_engine_falls_silent_and_one_that_goes_on_is_heard_again(directory):
    async def live():
        client = spawn_engine(fast_settings(directory))
        await client.start()
        steps = []
        client.on_steps = steps.extend
        await collect(client, request("first", [7] * 20, 20, eos=()))
        # The last step's time may come a moment after its tokens.
        await eventually(lambda: len(steps) == client.stats.num_steps == 20)
        assert sum(s.host + s.device for s in steps) == pytest.approx(client.stats.step_seconds)
        assert all(s.host > 0 and s.device >= 0 for s in steps)
        # Nobody waits for it: a pause is no silence.
        await asyncio.sleep(0.3)
        assert client.silence == 0.0
        os.kill(client.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.3)
            stream = client.generate(request("held", [7] * 20, 20, eos=()))
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            assert client.silence < 0.2  # from the question on, not from its last word
            await eventually(lambda: client.silence > 0.5)
            # It ends for its client at once; the engine still owes an answer.
            client.abort("held")
            assert (await asyncio.wait_for(waiting, 1)).finish_reason == "abort"
            await eventually(lambda: client.silence > 0.8)
        finally:
            os.kill(client.pid, signal.SIGCONT)
        await eventually(lambda: client.silence == 0.0)
        assert client.stats.num_free_blocks == client.info.num_blocks
        await client.shutdown()

    asyncio.run(live())


def test_a_users_mistake_comes_back_as_the_same_error(tmp_path):
    async def live():
        client = spawn_engine(fast_settings(write_model(tmp_path, rope_scaling={"type": "magic"})))
        with pytest.raises(UnsupportedConfigError, match="magic"):
            await client.start()
        assert "magic" in client.failure
        await client.shutdown()

    asyncio.run(live())


def test_shutdown_while_it_starts_leaves_no_process(directory):
    async def live():
        client = spawn_engine(make_settings(directory))
        starting = asyncio.create_task(client.start())
        while client.pid is None:
            await asyncio.sleep(0.01)
        pid = client.pid
        await client.shutdown()
        assert not is_running(pid)
        starting.cancel()

    asyncio.run(live())


@pytest.mark.parametrize(
    ("devices", "given", "expected"),
    [
        ([], {}, {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}),
        (["/dev/accel0"], {}, {}),
        ([], {"JAX_PLATFORMS": "tpu"}, {"JAX_PLATFORMS": "tpu"}),
    ],
)
def test_the_platform_is_chosen_by_the_chips_present(monkeypatch, devices, given, expected):
    monkeypatch.setattr(process.glob, "glob", lambda pattern: devices)
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: None)
    environ = dict(given)
    process.choose_platform(environ)
    assert environ == expected
