"""What a server runs with, from the command line, the environment and a file."""

from hexllm.core.settings.fields import Settings
from hexllm.core.settings.load import load_settings
from hexllm.core.settings.plugin_table import PluginSettings

__all__ = ["PluginSettings", "Settings", "load_settings"]
