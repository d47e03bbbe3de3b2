"""Hooks that are called, families that are resolved, checkpoints that are opened."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import pytest

from hexllm.core.errors import CheckpointError, PluginError, UnsupportedConfigError
from hexllm.core.locations import scheme_of
from hexllm.core.manifest import compare_manifests

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hexllm.core.plugins import Plugins
    from tests.core.conftest import Site

    Load = Callable[..., Plugins]

FAMILY = """{header}
@hookimpl
def hexllm_model_families():
    yield Component("zeta", "z:Zeta", ("ZetaForCausalLM", "OtherForCausalLM"))
"""


def configure(body: str) -> str:
    return "{header}seen = []\n@hookimpl\ndef hexllm_configure(process):\n    " + body + "\n"


def test_notify_calls_each_plugin_by_name_order_with_the_arguments_it_takes(
    site: Site, load: Load
) -> None:
    site.module("order", "names = []")
    for name in ("hexllm-b", "hexllm-c", "hexllm-a"):
        source = configure(f"import order; order.names.append(({name[-1]!r}, process))")
        site.distribution(name, source)
    load().notify("hexllm_configure", settings=object(), process="engine")
    assert sys.modules["order"].names == [("a", "engine"), ("b", "engine"), ("c", "engine")]


def test_a_failing_implementation_is_logged_once_and_hides_no_other(
    site: Site, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    site.distribution("hexllm-a", "{header}@hookimpl\ndef hexllm_engine_stats(stats): 1 / 0")
    source = "{header}seen = []\n@hookimpl\ndef hexllm_engine_stats(stats): seen.append(stats)"
    site.distribution("hexllm-b", source)
    plugins = load()
    for number in range(3):
        plugins.notify("hexllm_engine_stats", stats=number)
    assert sys.modules["hexllm_b"].seen == [0, 1, 2]
    (error,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert (
        "'hexllm-a' of hexllm-a 1.0: hexllm_engine_stats failed: ZeroDivisionError"
        in error.msg % (error.args or ())
    )
    assert error.exc_info


def test_a_required_plugin_may_refuse_to_be_configured(site: Site, load: Load) -> None:
    site.distribution("hexllm-a", configure("raise ValueError('no licence')"))
    load().notify("hexllm_configure", settings=None, process="server")
    for settings in ({"required": ["hexllm-a"]}, {"strict": True}):
        with pytest.raises(PluginError, match=r"'hexllm-a'.*ValueError: no licence"):
            load(**settings).notify("hexllm_configure", settings=None, process="server")


def test_a_family_is_resolved_by_its_first_known_architecture(site: Site, load: Load) -> None:
    site.distribution("hexllm-zeta", FAMILY)
    config = {"architectures": ["NobodyKnows", "ZetaForCausalLM"]}
    assert load().resolve_model_family(config).qualified_name == "zeta@hexllm-zeta"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"architectures": ["ZetaForCausalML"]},
            "No model family serves architecture 'ZetaForCausalML'. Did you mean 'ZetaForCausalLM'",
        ),
        ({}, "config.json has no 'architectures'"),
        ({"architectures": None}, "config.json has no 'architectures'"),
    ],
)
def test_an_unknown_architecture_lists_what_is_served(
    site: Site, load: Load, config: dict[str, object], reason: str
) -> None:
    site.distribution("hexllm-zeta", FAMILY)
    site.distribution("hexllm-bad", "import nowhere_at_all")
    with pytest.raises(UnsupportedConfigError) as caught:
        load().resolve_model_family(config)
    assert reason in str(caught.value)
    assert "OtherForCausalLM" in str(caught.value).partition("Served: ")[2]
    assert "'hexllm-bad' of hexllm-bad 1.0 might offer it" in str(caught.value)


def resolver(body: str) -> str:
    return f"{{header}}@hookimpl\ndef hexllm_resolve_model_family(hf_config, claims):\n    {body}\n"


def test_a_plugin_may_choose_the_family_before_the_core_does(site: Site, load: Load) -> None:
    site.distribution("hexllm-zeta", FAMILY)
    site.distribution(
        "hexllm-choose",
        resolver("return next(n for n, c in claims.items() if hf_config['want'] in c)"),
    )
    site.distribution("hexllm-silent", resolver("return None"))
    config = {"architectures": ["Unheard"], "want": "OtherForCausalLM"}
    assert load().resolve_model_family(config).component.name == "zeta"


def test_a_resolver_that_raises_is_passed_over_and_shown_broken(
    site: Site, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    site.distribution("hexllm-zeta", FAMILY)
    site.distribution("hexllm-choose", resolver("raise KeyError('x')"))
    plugins = load()
    before = plugins.manifest()
    family = plugins.resolve_model_family({"architectures": ["ZetaForCausalLM"]})
    assert family.component.name == "zeta"
    (row,) = [row for row in plugins.rows if row.status == "broken"]
    assert row.reason == "hexllm_resolve_model_family failed: KeyError: 'x'"
    assert "'hexllm-choose' of hexllm-choose 1.0 is passed over" in caplog.text
    assert plugins.manifest() == before


def test_a_resolver_that_names_a_family_nobody_offers(site: Site, load: Load) -> None:
    site.distribution("hexllm-zeta", FAMILY)
    site.distribution("hexllm-choose", resolver("return 'zetta'"))
    with pytest.raises(PluginError, match=r"'hexllm-choose'.*'zetta'.*Did you mean 'zeta'\?"):
        load().resolve_model_family({"architectures": ["ZetaForCausalLM"]})


LOADER = """{header}
@hookimpl
def hexllm_weight_loaders():
    yield Component("box", "box_impl:Box", ("box",))
"""

BOX = """
from pathlib import Path
class Opened:
    def __init__(self, uri, revision): self.uri, self.revision = uri, revision
    def directory(self): return Path()
    def file(self, name): return None
    def tensors(self): return {}
    def read(self, name, index=None): raise KeyError(name)
class Box:
    def open(self, uri, revision=None):
        if "fail" in uri: raise OSError("disk on fire")
        return 3 if "odd" in uri else Opened(uri, revision)
"""


def test_a_checkpoint_is_opened_by_the_loader_of_its_scheme(site: Site, load: Load) -> None:
    site.distribution("hexllm-box", LOADER)
    site.module("box_impl", BOX)
    plugins = load()
    opened = plugins.open_checkpoint("BOX://a/b", "main")
    assert (opened.uri, opened.revision) == ("BOX://a/b", "main")  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"'box' of hexllm-box 1.0 failed on box://fail: OSE"):
        plugins.open_checkpoint("box://fail")
    with pytest.raises(PluginError, match=r"'box' of hexllm-box 1.0 returned int"):
        plugins.open_checkpoint("box://odd")
    with pytest.raises(PluginError, match=r"URI scheme 'bix' is not known. Did you mean 'box'\?"):
        plugins.open_checkpoint("bix://a")


def test_the_scheme_of_a_name_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert scheme_of("GS://bucket/model") == "gs"
    assert scheme_of(str(tmp_path)) == "file"
    assert scheme_of("org/name") == "file"
    assert scheme_of("org/other-1.5_B") == "hf"
    for name in ("gpt2", "", "a/b/c", "./absent", "/absent/model", "x" * 5000, "nul\0"):
        with pytest.raises(CheckpointError, match="was not found: there is no file or directory"):
            scheme_of(name)


def test_manifests_that_differ_are_told_apart() -> None:
    server = (("a", "1.0", "a"), ("b", "1.0", "b"), ("c", "1.0", "c"))
    compare_manifests(server, tuple(reversed(server)))
    engine = (("a", "1.0", "a"), ("b", "2.0", "b"), ("d", "1.0", "d"))
    with pytest.raises(PluginError) as caught:
        compare_manifests(server, engine)
    assert (
        "b (b) is 1.0 in the server and 2.0 in the engine, c (c) 1.0 works in the server process "
        "only and d (d) 1.0 works in the engine process only"
    ) in str(caught.value)
