"""What a server runs with, from the command line, the environment and a file."""

from hexllm.core.settings.fields import PluginSettings, Settings
from hexllm.core.settings.load import load_settings

__all__ = ["PluginSettings", "Settings", "load_settings"]
