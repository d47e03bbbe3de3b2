"""The settings in words: ``hexllm serve --help`` and ``docs/flags.md`` from the same rows.

``python -m hexllm.core.settings.reference docs/flags.md`` writes the page.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from hexllm.core.settings.declare import GROUPS
from hexllm.core.settings.fields import ALIASES, Settings, plain
from hexllm.core.settings.not_yet import NOT_YET
from hexllm.core.settings.plugin_table import PluginSettings

_HELP_HEAD = """\
usage: hexllm serve --model=MODEL [--name=value ...]
       python -m hex_llm.server.api_server --model=MODEL [--name=value ...]

Serve a model. A setting comes from its flag, else from HEXLLM_<NAME> in the environment,
else from the file named by --config, else from its default. Dashes and underscores are
the same in flags; --no-<name> turns a switch off. [not yet]: only the default works.
"""

_HELP_TAIL = """
  --options.COMPONENT.NAME=VALUE
                        An option of a plugin's component, such as a scheduling policy.
                        Lists and tables are written in JSON.

other:
  -h, --help            Show this and exit.
"""

_PAGE_HEAD = """\
# Settings

<!-- Written by `python -m hexllm.core.settings.reference docs/flags.md`; do not edit. -->

A setting is looked for in this order, and the first place that has it wins:

1. the command line: `--port=7080`, `--port 7080`; dashes and underscores are the same. A switch is
   written `--warmup`, `--no-warmup`, `--warmup=true` or `--warmup=false`;
2. the environment: `HEXLLM_PORT=7080`; an empty variable counts as unset;
3. the file named by `--config` (or `HEXLLM_CONFIG`), TOML or YAML, whose keys are the settings'
   names: `port = 7080`;
4. the default.

`none` unsets a setting that can be unset. A name that hexllm does not know is an error that gives
the nearest one, in all three places. **Not yet** marks what Hex-LLM had and hexllm refuses so far.
"""

_PAGE_TAIL = """
## Plugins and their options

In the file:

```toml
model = "meta-llama/Llama-3.2-1B-Instruct"
scheduling_policy = "mine"

[plugins]
files = ["./mine.py"]    # from the directory of this file
strict = true

[options.mine]           # by the component's name
weight = 2
```

On the command line: `--plugins.files=mine.py --plugins.strict --options.mine.weight=2`, lists with
commas between their items. In the environment: `HEXLLM_PLUGINS__STRICT=true`,
`HEXLLM_OPTIONS__MINE__WEIGHT=2` (for components whose names are of letters, digits and `_`).

## Variables of Hex-LLM and of Vertex AI

| variable | sets | |
|---|---|---|
| `HEX_LLM_LOG_LEVEL` | `log_level` | |
| `HEX_LLM_VERBOSE_LOG` | `verbose_log` | |
| `AIP_HTTP_PORT` | `port` | |
| `AIP_HEALTH_ROUTE` | `health_route` | |
| `AIP_PREDICT_ROUTE` | `predict_route` | |
| `AIP_STORAGE_URI` | `model` | only when nothing else names a model, the file included |
| `MODEL_ID` | nothing | Vertex AI's notebooks set it as a label beside `--model` |

`HEXLLM_<NAME>` beats them; they beat the file. `HEXLLM_CACHE` is no setting: it names the directory
for whatever hexllm keeps between starts (default `~/.cache/hexllm`).
"""


@dataclass(frozen=True)
class Row:
    """One setting in words.

    Attributes:
        name: With its prefix, ``plugins.strict``.
        group: One of ``GROUPS``.
        meaning: One line.
        choices: Its values when they are few.
        default: In words; None when it must be given.
        is_switch: Whether it is true or false.
        not_yet: Why only the default works, or None.
    """

    name: str
    group: str
    meaning: str
    choices: tuple[str, ...]
    default: str | None
    is_switch: bool
    not_yet: str | None


def rows() -> list[Row]:
    """Return every setting, group by group in the order of ``GROUPS``."""
    found = []
    for prefix, model in (("", Settings), ("plugins.", PluginSettings)):
        for name, field in model.model_fields.items():
            extra: Any = field.json_schema_extra
            if extra is None:  # the tables themselves
                continue
            default = None if field.is_required() else extra["shown_default"]
            if default is None and not field.is_required():
                default = plain(field.get_default())
            found.append(
                Row(
                    name=prefix + name,
                    group=extra["group"],
                    meaning=field.description or "",
                    choices=_choices(field.annotation),
                    default=default,
                    is_switch=field.annotation is bool,
                    not_yet=NOT_YET[name][1] if not prefix and name in NOT_YET else None,
                )
            )
    return sorted(found, key=lambda row: GROUPS.index(row.group))


def help_text() -> str:
    """Return what ``--help`` prints."""
    lines = [_HELP_HEAD]
    group = None
    for row in rows():
        if row.group != group:
            lines.append(f"{row.group}:" if group is None else f"\n{row.group}:")
            group = row.group
        value = "" if row.is_switch else "={" + ",".join(row.choices) + "}" if row.choices else "=…"
        spelled = ", ".join(f"--{name}{value}" for name in _spellings(row))
        default = "required" if row.default is None else f"default: {row.default}"
        mark = " [not yet]" if row.not_yet else ""
        text = textwrap.fill(
            f"{row.meaning} ({default}){mark}",
            width=92,
            initial_indent=" " * 24,
            subsequent_indent=" " * 24,
        )
        lines.append(f"  {spelled}\n{text}")
    return "\n".join(lines) + "\n" + _HELP_TAIL.lstrip("\n")


def flags_page() -> str:
    """Return the text of ``docs/flags.md``."""
    parts = [_PAGE_HEAD]
    for group in GROUPS:
        parts.append(f"\n## {group}\n\n| flag | default | meaning |\n|---|---|---|\n")
        for row in rows():
            if row.group != group:
                continue
            spelled = " ".join(f"`--{name}`" for name in _spellings(row))
            default = "must be given" if row.default is None else f"`{row.default}`"
            if row.default is not None and (" " in row.default):
                default = row.default
            meaning = row.meaning
            if row.choices:
                meaning += " Choices: " + ", ".join(f"`{choice}`" for choice in row.choices) + "."
            if row.not_yet:
                meaning += f" **Not yet**: {row.not_yet}."
            parts.append(f"| {spelled} | {default} | {meaning} |\n")
    return "".join(parts) + _PAGE_TAIL


def _spellings(row: Row) -> list[str]:
    names = [row.name, *(alias for alias, name in ALIASES.items() if name == row.name)]
    if row.is_switch:
        names.append(f"no-{row.name}")
    return names


def _choices(annotation: Any) -> tuple[str, ...]:
    if annotation is not None and getattr(annotation, "__origin__", None) is not None:
        values = get_args(annotation)
        if values and not any(isinstance(value, type) or value is ... for value in values):
            return tuple(str(value) for value in values)
    return ()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(flags_page(), encoding="utf-8")
