"""What ``hexllm plugins`` prints: every plugin and what it offers, as a table or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hexllm
from hexllm.core.errors import PluginError
from hexllm.core.hookspecs import PLUGIN_API
from hexllm.core.registry import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hexllm.core.plugins import PluginRow, Plugins


def check_implementations(plugins: Plugins) -> dict[tuple[str, str], str]:
    """Import what every component names and return why each one that fails does.

    Returns:
        Reasons by (kind, ``name@distribution``); empty when all is well.
    """
    failures = {}
    for registry in plugins.registries:
        for registered in registry:
            try:
                registered.load()
            except PluginError as error:
                failures[registry.kind.key, registered.qualified_name] = str(error)
    return failures


def as_json(plugins: Plugins, failures: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """Return the plugins as plain data; its keys are a stable interface.

    Args:
        plugins: What was loaded.
        failures: What :func:`check_implementations` returned, or nothing when it did not run.
    """
    return {
        "hexllm": hexllm.__version__,
        "plugin_api": PLUGIN_API,
        "plugins": [
            {
                "name": row.name,
                "distribution": row.distribution,
                "version": row.version,
                "entry_point": row.entry_point,
                "status": row.status,
                "reason": row.reason,
                "remarks": list(row.remarks),
                "components": {
                    kind: [
                        {
                            "name": one.name,
                            "provides": list(one.provides),
                            "summary": one.summary,
                            "implementation": one.implementation,
                            "options": one.options,
                            "failure": failures.get((kind, f"{one.name}@{row.distribution}"), ""),
                        }
                        for one in components
                    ]
                    for kind, components in sorted(row.components.items())
                },
            }
            for row in plugins.rows
        ],
    }


def as_table(plugins: Plugins, failures: Mapping[tuple[str, str], str]) -> str:
    """Return the plugins and, under the name of each kind, the components, as aligned text."""
    parts = [_plugin_table(plugins.rows)]
    for kind in KINDS:
        rows = [
            (one.name, row.distribution, ", ".join(one.provides), one.summary)
            for row in plugins.rows
            for one in row.components.get(kind.key, ())
        ]
        if rows:
            heading = (kind.key.replace("_", " "), "distribution", f"{kind.claim}s", "")
            parts.append(_aligned([heading, *sorted(rows)]))
    notes = [f"{row.name}: {row.reason}" for row in plugins.rows if row.status == "broken"]
    notes += [f"{row.name}: {remark}" for row in plugins.rows for remark in row.remarks]
    notes += list(failures.values())
    parts += ["\n".join(notes)] if notes else []
    return "\n\n".join(parts)


def _plugin_table(rows: tuple[PluginRow, ...]) -> str:
    lines: list[tuple[str, ...]] = [("plugin", "distribution", "version", "status", "offers")]
    for row in rows:
        count = sum(len(components) for components in row.components.values())
        offers = "" if row.status != "ok" else f"{count} component{'' if count == 1 else 's'}"
        lines.append((row.name, row.distribution, row.version, row.status, offers))
    return _aligned(lines)


def _aligned(lines: list[tuple[str, ...]]) -> str:
    used = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in used]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in zip(*used, strict=True)
    )
