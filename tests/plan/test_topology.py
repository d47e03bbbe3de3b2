from __future__ import annotations

import importlib.util
import sys

import pytest

from hexllm.core.errors import ConfigError
from hexllm.plan.chips import CHIPS, chip_of
from hexllm.plan.topology import (
    MACHINES,
    accelerator_types,
    devices,
    layouts,
    parse_topology,
)

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler"
)


@pytest.mark.parametrize(
    ("text", "name", "num_devices", "num_hosts"),
    [
        ("v5e:2x2", "v5e:2x2", 4, 1),
        ("v5e:4x4", "v5e:4x4", 16, 4),
        ("v6e:1x1", "v6e:1x1", 1, 1),
        ("V6E:2x4 ", "v6e:2x4", 8, 1),
        ("v5p:2x2x1", "v5p:2x2x1", 4, 1),
        ("v5p:2x2x2", "v5p:2x2x2", 8, 2),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 8, 1),
        ("v7x:1x1x1", "tpu7x:1x1x1", 2, 1),
        ("ct5lp-hightpu-1t", "v5e:1x1", 1, 1),
        ("ct5lp-hightpu-4t", "v5e:2x2", 4, 1),
        ("ct5lp-hightpu-8t", "v5e:2x4", 8, 1),
        ("ct6e-standard-1t", "v6e:1x1", 1, 1),
        ("ct6e-standard-4t", "v6e:2x2", 4, 1),
        ("ct6e-standard-8t", "v6e:2x4", 8, 1),
        ("ct5p-hightpu-4t", "v5p:2x2x1", 4, 1),
        ("v5litepod-4", "v5e:2x2", 4, 1),
        ("v5litepod-16", "v5e:4x4", 16, 4),
        ("v5e-4", "v5e:2x2", 4, 1),
        ("v6e-8", "v6e:2x4", 8, 1),
        ("v6e-256", "v6e:16x16", 256, 64),
        ("v5p-8", "v5p:2x2x1", 4, 1),
        ("v5p-16", "v5p:2x2x2", 8, 2),
        ("v4-8", "v4:2x2x1", 4, 1),
        ("tpu7x-8", "tpu7x:2x2x1", 8, 1),
    ],
)
def test_names_of_topologies(text, name, num_devices, num_hosts):
    topology = parse_topology(text)
    assert topology.name == name
    assert topology.chip is CHIPS[name.partition(":")[0]]
    assert (topology.num_devices, topology.num_hosts) == (num_devices, num_hosts)
    assert parse_topology(topology.name) == topology


@pytest.mark.parametrize(
    ("text", "what_would_do"),
    [
        ("v5e:3x3", r"v5e:1x1, v5e:2x2.* or v5e:16x16"),
        ("v5e:2x2x1", r"v5e:2x2,"),
        ("v5p:2x2", r"v5p:2x2x1,"),
        ("v6e-6", r"v6e-4, v6e-8"),
        ("v5p-4x", r"v5e:2x2, v6e-8 or ct5lp-hightpu-4t"),
        ("v9z:2x2", r"v9z.*v5e, .*v7x"),
        ("h100-8", r"h100.*v5e"),
        ("", r"v5e:2x2, v6e-8"),
        ("ct5lp-hightpu-2t", r"ct5lp-hightpu-1t, ct5lp-hightpu-4t"),
    ],
)
def test_a_wrong_name_says_what_would_do(text, what_would_do):
    with pytest.raises(ConfigError, match=what_would_do) as caught:
        parse_topology(text)
    assert repr(text) in str(caught.value)


def test_libtpu_missing_is_said(monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"libtpu is not installed.*pip install"):
        devices(parse_topology("v5e:2x2"))


@needs_libtpu
def test_what_libtpu_refuses_is_said(monkeypatch):
    monkeypatch.setattr("hexllm.plan.topology._libtpu_options", lambda topology: {"nonsense": 1})
    with pytest.raises(ConfigError, match=r"libtpu does not make topology v5e:2x2: .*v6e-8"):
        devices(parse_topology("v5e:2x2"))


@needs_libtpu
@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "text", [*sorted(MACHINES), *(f"{chip}:{each}" for chip in CHIPS for each in layouts(chip)[:5])]
)
def test_libtpu_has_as_many_devices_and_hosts_as_said(text):
    topology = parse_topology(text)
    found = devices(topology)
    assert len(found) == topology.num_devices
    assert len({device.process_index for device in found}) == topology.num_hosts
    assert chip_of(found[0].device_kind) is topology.chip
    assert getattr(found[0], "num_cores", 1) == topology.chip.num_cores


@pytest.mark.parametrize("chip", CHIPS)
def test_every_accelerator_type_is_one_layout(chip):
    types = accelerator_types(chip)
    assert tuple(types.values()) == layouts(chip)
    assert list(types) == sorted(types)
