"""One broken plugin is a row with a reason; the others, and the process, go on."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import pytest

from hexllm.core import importing
from hexllm.core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hexllm.core.plugins import PluginRow, Plugins
    from tests.core.conftest import Site

    Load = Callable[..., Plugins]

#: The built-in scheduling policies.
BUILT_IN = ("fair", "fcfs", "priority", "sjf")


def row_of(plugins: Plugins, name: str) -> PluginRow:
    (row,) = [row for row in plugins.rows if row.name == name]
    return row


def test_a_working_plugin_is_a_row_and_its_policy_is_built(site: Site, load: Load) -> None:
    site.distribution("hexllm-even", site.POLICY, version="0.2", entry_point="even")
    site.module("hexllm_even_impl", site.EVEN)
    plugins = load()
    row = row_of(plugins, "even")
    assert (row.distribution, row.version, row.entry_point) == ("hexllm-even", "0.2", "hexllm_even")
    assert (row.status, row.reason, row.remarks) == ("ok", "", ())
    assert [one.name for one in row.components["scheduling_policies"]] == ["even"]
    assert plugins.policies.names() == ("even", *BUILT_IN)
    assert ("hexllm-even", "0.2", "hexllm_even") in plugins.manifest()
    assert "hexllm_even_impl" not in sys.modules
    assert type(plugins.policies.get("even").build()).__name__ == "Even"


BROKEN = {
    "import error": ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere"),
    "syntax error": ("def", "SyntaxError"),
    "sys.exit": ("import sys; sys.exit(3)", "importing hexllm_bad failed: SystemExit: 3"),
    "a panic that is no Exception": (
        "class Panic(BaseException): pass\nraise Panic('boom')",
        "Panic: boom",
    ),
    "no API number": ("x = 1", "does not say HEXLLM_PLUGIN_API = 1"),
    "newer API": ("HEXLLM_PLUGIN_API = 2", "needs plugin API 2 and this hexllm speaks 1; update"),
    "API that is no number": ("HEXLLM_PLUGIN_API = 'one'", "'one' is not a whole number"),
    "no hook": ("{header}", "implements no hook"),
    "wrong hook argument": (
        "{header}@hookimpl\ndef hexllm_configure(setings): pass",
        "no argument 'setings'; the hook takes settings, process. Did you mean 'settings'?",
    ),
    "argument of a hook that has none": (
        "{header}@hookimpl\ndef hexllm_quantizers(config): return []",
        "no argument 'config'; the hook takes no arguments.",
    ),
    "keyword arguments": (
        "{header}@hookimpl\ndef hexllm_configure(**kwargs): pass",
        "takes **kwargs; name the arguments",
    ),
    "misspelt hook": (
        "{header}@hookimpl\ndef hexllm_scheduling_polices(): return []",
        "no hook 'hexllm_scheduling_polices'. Did you mean 'hexllm_scheduling_policies'?",
    ),
    "misspelt and unmarked": (
        "{header}def hexllm_quantiser(): return []",
        "no hook 'hexllm_quantiser'. Did you mean 'hexllm_quantizers'?",
    ),
    "marked under another name": ("{header}@hookimpl\ndef offer(): return []", "no hook 'offer'"),
    "mark forgotten": (
        "{header}def hexllm_quantizers(): return []",
        "hexllm_quantizers is not marked with @hookimpl",
    ),
    "wrapper": (
        "{header}@hookimpl(wrapper=True)\ndef hexllm_quantizers():\n    return (yield)",
        "is a hook wrapper",
    ),
    "async hook": ("{header}@hookimpl\nasync def hexllm_quantizers(): return []", "is async"),
    "hook that raises": (
        "{header}@hookimpl\ndef hexllm_quantizers():\n    1 / 0\n    yield",
        "hexllm_quantizers failed: ZeroDivisionError: division by zero",
    ),
    "hook that exits": (
        "{header}@hookimpl\ndef hexllm_quantizers(): raise SystemExit",
        "hexllm_quantizers failed: SystemExit",
    ),
    "None instead of records": ("{header}@hookimpl\ndef hexllm_quantizers(): pass", "yield Comp"),
    "a record of another type": (
        "{header}@hookimpl\ndef hexllm_quantizers(): yield {'name': 'x'}",
        "yields {'name': 'x'}, which is not a hexllm.Component",
    ),
    "a bad record": (
        "{header}@hookimpl\ndef hexllm_quantizers(): yield Component('X', 'a:b')",
        "Component name 'X' is not usable",
    ),
    "a name twice": (
        "{header}@hookimpl\ndef hexllm_quantizers(): return [Component('x', 'a:b')] * 2",
        "yields the name 'x' twice",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_one_row_and_one_warning(
    site: Site, load: Load, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    source, reason = BROKEN[case]
    site.distribution("hexllm-bad", source, version="0.3", entry_point="bad")
    site.distribution("hexllm-even", site.POLICY)
    plugins = load()
    row = row_of(plugins, "bad")
    assert row.status == "broken"
    assert reason in row.reason
    assert not row.components
    assert not any(name == "hexllm-bad" for name, _, _ in plugins.manifest())
    (warning,) = [record for record in caplog.records if "bad" in record.getMessage()]
    assert warning.levelno == logging.WARNING
    assert "Plugin 'bad' of hexllm-bad 0.3 is broken" in warning.getMessage()
    assert "even" in plugins.policies.names()


def test_nothing_of_a_broken_plugin_is_offered_or_called(site: Site, load: Load) -> None:
    source = site.POLICY + (
        "@hookimpl\ndef hexllm_quantizers(): raise RuntimeError('half a plugin')\n"
        "calls = []\n@hookimpl\ndef hexllm_configure(process): calls.append(process)\n"
    )
    site.distribution("hexllm-half", source)
    plugins = load()
    plugins.notify("hexllm_configure", settings=None, process="server")
    assert plugins.policies.names() == BUILT_IN
    assert sys.modules["hexllm_half"].calls == []


def test_a_broken_module_is_imported_once(site: Site, load: Load, tmp_path: Path) -> None:
    log = tmp_path / "imports"
    source = f"with open({str(log)!r}, 'a') as f: f.write('x')\nraise ImportError('no')"
    site.distribution("hexllm-bad", source)
    (site.folder / "hexllm_bad-1.0.dist-info" / "entry_points.txt").write_text(
        "[hexllm]\none = hexllm_bad\ntwo = hexllm_bad\n"
    )
    plugins = load(load=["hexllm_bad"])
    assert log.read_text() == "x"
    assert row_of(plugins, "one").reason == "importing hexllm_bad failed: ImportError: no"
    assert "is already the plugin 'one'" in row_of(plugins, "two").reason


def test_a_slow_import_is_named_with_its_seconds_and_still_works(
    site: Site,
    load: Load,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(importing, "SLOW_IMPORT_SECONDS", 0.2)
    log = tmp_path / "imports"
    slow = f"import time; time.sleep(0.3)\nwith open({str(log)!r}, 'a') as f: f.write('x')\n"
    site.distribution("hexllm-slow", slow + site.POLICY, entry_point="slow")
    site.module("hexllm_slow_impl", "raise RuntimeError('a listing imports no implementation')")
    plugins = load()
    row = row_of(plugins, "slow")
    assert row.status == "ok"
    assert any("importing it took 0." in remark for remark in row.remarks)
    assert "Plugin 'slow' of hexllm-slow 1.0: importing it took" in caplog.text
    load()
    assert log.read_text() == "x"


def test_an_entry_module_that_imports_a_heavy_library_is_named(
    site: Site, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.module("heavy_stand_in", "")
    monkeypatch.setattr(importing, "_HEAVY", ("heavy_stand_in",))
    site.distribution("hexllm-heavy", "import heavy_stand_in\n" + site.POLICY, entry_point="heavy")
    (remark,) = row_of(load(), "heavy").remarks
    assert remark.startswith("its entry module imports heavy_stand_in")


def test_entry_points_that_cannot_be_used(site: Site, load: Load) -> None:
    site.distribution("hexllm-odd", entry_point="odd", module="hexllm_odd:plugin")
    assert "must be a module's dotted name" in row_of(load(), "odd").reason


def test_a_stale_copy_behind_the_imported_one_does_not_count(
    site: Site, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.distribution("hexllm-even", site.POLICY, version="2.0", entry_point="even")
    behind = type(site)(tmp_path / "behind")
    behind.folder.mkdir()
    behind.distribution("hexllm_even", site.POLICY, version="1.0", entry_point="even")
    monkeypatch.setattr(sys, "path", [*sys.path, str(behind.folder)])
    assert row_of(load(), "even").version == "2.0"


def test_damaged_metadata_of_another_package_is_no_matter(site: Site, load: Load) -> None:
    (site.folder / "other-1.0.dist-info").mkdir()
    site.distribution("hexllm-even", site.POLICY)
    assert "even" in load().policies.names()


def test_rows_are_sorted_by_name_whatever_the_order_of_installation(site: Site, load: Load) -> None:
    for name in ("hexllm-c", "hexllm-a", "hexllm-b"):
        site.distribution(name, site.POLICY.replace('"even"', f'"{name[-1]}"'))
    plugins = load()
    names = [row.name for row in plugins.rows]
    assert names == sorted(names)
    assert plugins.policies.names() == ("a", "b", "c", *BUILT_IN)


@pytest.mark.parametrize("spelling", ["even", "hexllm-even", "Hexllm_Even", "even@hexllm-even"])
def test_disable(site: Site, load: Load, spelling: str) -> None:
    site.distribution("hexllm-even", "raise RuntimeError('must not run')", entry_point="even")
    plugins = load(disable=[spelling])
    assert row_of(plugins, "even").status == "disabled"
    with pytest.raises(PluginError, match=r"'even' of hexllm-even 1\.0 might .* is disabled"):
        plugins.policies.get("even")


@pytest.mark.parametrize("option", ["disable", "required"])
def test_a_plugin_that_does_not_exist_cannot_be_named(site: Site, load: Load, option: str) -> None:
    site.distribution("hexllm-even", site.POLICY, entry_point="even")
    with pytest.raises(ConfigError, match=rf"plugins.{option} names 'hexllm-evan'.*mean 'hexllm-e"):
        load(**{option: ["hexllm-evan"]})


def test_required_and_strict_make_a_broken_plugin_fatal(site: Site, load: Load) -> None:
    site.distribution("hexllm-bad", "import nowhere_at_all", entry_point="bad")
    site.distribution("hexllm-even", site.POLICY, entry_point="even")
    load(required=["even"])
    with pytest.raises(PluginError, match=r"'bad' of hexllm-bad.*plugins.required.*nowhere_at_all"):
        load(required=["hexllm-bad"])
    with pytest.raises(PluginError, match=r"'bad' of hexllm-bad.*plugins.strict.*nowhere_at_all"):
        load(strict=True)
    load(strict=True, disable=["bad"])
    with pytest.raises(PluginError, match=r"in both plugins.required and plugins.disable"):
        load(required=["bad"], disable=["bad"])


def test_load_names_a_module_that_is_no_entry_point(site: Site, load: Load) -> None:
    site.module("mine.policy", site.POLICY)
    plugins = load(load=["mine.policy", "mine.absent"])
    row = row_of(plugins, "mine.policy")
    assert (row.distribution, row.version, row.status) == ("mine", "unknown", "ok")
    assert row_of(plugins, "mine.absent").status == "broken"
    assert "even" in plugins.policies.names()


def test_an_installed_plugin_that_is_loaded_too_is_one_plugin(site: Site, load: Load) -> None:
    site.distribution("hexllm-even", site.POLICY)
    rows = load(load=["hexllm_even"]).rows
    assert [row.status for row in rows if row.entry_point == "hexllm_even"] == ["ok"]


def test_files_are_plugins_with_their_contents_as_version(
    site: Site, load: Load, tmp_path: Path
) -> None:
    file = tmp_path / "my-policy.py"
    source = site.POLICY.replace('"{module}_impl:Even"', 'f"{__name__}:Even"') + site.EVEN
    file.write_text(source)
    plugins = load(files=[str(file), str(tmp_path / "absent.py")])
    row = row_of(plugins, str(file))
    assert (row.distribution, row.status) == ("my-policy.py", "ok")
    assert type(plugins.policies.get("even@my-policy.py").build()).__name__ == "Even"
    absent = row_of(plugins, str(tmp_path / "absent.py"))
    assert "cannot be read: No such file" in absent.reason
    file.write_text(source + "# changed\n")
    assert row_of(load(files=[str(file)]), str(file)).version != row.version
