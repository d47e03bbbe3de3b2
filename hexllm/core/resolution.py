"""The core's own answer to which family serves a model: by ``architectures``, as the field does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hexllm.core.errors import UnsupportedConfigError
from hexllm.core.hookspecs import hookimpl
from hexllm.core.wording import listing, suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hexllm.core.registry import Registry


class ByArchitecture:
    """Implements ``hexllm_resolve_model_family`` after every plugin's implementation."""

    def __init__(self, families: Registry) -> None:
        self._families = families

    @hookimpl(trylast=True)
    def hexllm_resolve_model_family(self, hf_config: Mapping[str, Any]) -> str:
        """Return ``name@distribution`` of the family that provides one of the architectures.

        Raises:
            UnsupportedConfigError: No family does.
            PluginError: More than one does.
        """
        known = sorted({claim for family in self._families for claim in family.component.provides})
        asked = _architectures(hf_config)
        for architecture in asked:
            if architecture in known:
                return self._families.claimed(architecture).qualified_name
        if asked:
            names = listing([repr(one) for one in asked], "or")
            what = f"No model family serves architecture {names}.{suggestion(asked[0], known)}"
        else:
            what = "The model's config.json has no 'architectures', so its family is unknown."
        sentences = [what, f"Served: {listing(known)}.", *self._families.missing]
        raise UnsupportedConfigError(" ".join(sentences))


def _architectures(hf_config: Mapping[str, Any]) -> list[str]:
    found = hf_config.get("architectures")
    if not isinstance(found, (list, tuple)):
        return []
    return [each for each in found if isinstance(each, str)]
