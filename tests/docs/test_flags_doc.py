"""docs/flags.md is written from the settings, and goes stale never."""

from pathlib import Path

from hexllm.core.settings import Settings
from hexllm.core.settings.reference import flags_page, rows
from hexllm.core.settings.sources import FOREIGN_VARIABLES

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def test_the_page_is_what_the_settings_say():
    assert PAGE.read_text(encoding="utf-8") == flags_page(), (
        "docs/flags.md is stale. Run: python -m hexllm.core.settings.reference docs/flags.md"
    )


def test_every_setting_and_variable_is_on_it():
    page = flags_page()
    for name in set(Settings.model_fields) - {"plugins", "options"}:
        assert f"| `--{name}`" in page
    for variable in FOREIGN_VARIABLES:
        assert f"| `{variable}` | `{FOREIGN_VARIABLES[variable]}` |" in page


def test_every_row_has_a_meaning_of_a_line_or_two():
    for row in rows():
        assert row.meaning.endswith("."), row.name
        assert 10 < len(row.meaning) < 160, row.name
