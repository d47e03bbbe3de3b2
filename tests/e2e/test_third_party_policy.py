"""A policy from a package that pip installed decides who is served first."""

import json
import threading

import pytest

from tests.e2e.serving import environment, serve
from tests.e2e.test_faults import FLAGS, model  # noqa: F401 - a fixture
from tests.plugins.test_example_plugin import installed  # noqa: F401 - a fixture

OPTIONS = {"shortest": "[options.shortest]\npatience = 10000.0\n"}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fcfs", ["long", "middle", "short"]), ("shortest", ["short", "middle", "long"])],
)
def test_its_order_is_seen_in_what_is_served(policy, expected, model, installed, tmp_path):  # noqa: F811
    env = environment()
    env["PYTHONPATH"] += f":{installed}"
    flags = [f"--model={model}", "--load_format=dummy", *FLAGS, "--max_running_seqs=1"]
    config = tmp_path / "server.toml"
    # However slow the machine is, nobody waits for so long that they go first.
    config.write_text(f'scheduling_policy = "{policy}"\n' + OPTIONS.get(policy, ""))
    flags += [f"--config={config}"]
    with serve(tmp_path, *flags, env=env) as served:
        order = []

        def ask(name, length, max_tokens):
            body = {"prompt": [7] * length, "max_tokens": max_tokens, "ignore_eos": True}
            served.complete(**body, temperature=0)
            order.append(name)

        threads = []
        # The first holds the only place until all others wait.
        for count, job in enumerate(
            [("first", 8, 400), ("long", 300, 40), ("middle", 100, 30), ("short", 10, 20)]
        ):
            threads.append(threading.Thread(target=ask, args=job))
            threads[-1].start()
            served.wait_for(
                lambda count=count: (
                    served.metric("vllm:num_requests_running") == 1
                    and served.metric("vllm:num_requests_waiting") == count
                )
            )
        assert order == []
        for thread in threads:
            thread.join()
        assert order == ["first", *expected]
        log = served.log.read_text()
        assert "Traceback" not in log, json.dumps(log[-2000:])
