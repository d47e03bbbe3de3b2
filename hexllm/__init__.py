"""hexllm: an LLM server for Cloud TPU built as a small core of hook specs.

Importing this package costs nothing: it never imports JAX. A plugin needs two names from here,
:data:`hookimpl` and :class:`Component`.
"""

from hexllm.core.component import Component
from hexllm.core.hookspecs import hookimpl

__version__ = "0.1.0"
__all__ = ["Component", "__version__", "hookimpl"]
