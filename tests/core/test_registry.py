"""Choosing a component by name or claim, and building it with its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hexllm.core.errors import ConfigError, HexllmError, PluginError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hexllm.core.plugins import Plugins
    from tests.core.conftest import Site

    Load = Callable[..., Plugins]

#: The built-in scheduling policies.
BUILT_IN = ("fair", "fcfs", "priority", "sjf")


OPTIONS = """
from pydantic import BaseModel, Field, model_validator
class Options(BaseModel):
    weight: int = Field(1, ge=0)
    tenant: str = "all"
    @model_validator(mode="after")
    def _check(self):
        if self.tenant == "nobody":
            raise ValueError("nobody is no tenant")
        return self
"""


def component(hook: str, *arguments: str) -> str:
    """An entry module that yields one component a string of ``Component``'s arguments."""
    yields = "".join(f"    yield Component({each})\n" for each in arguments)
    return "{header}@hookimpl\ndef " + hook + "():\n" + yields


def refusal(error: type[HexllmError], call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def test_a_name_offered_twice_is_an_error_only_when_chosen(site: Site, load: Load) -> None:
    site.distribution("hexllm-other", site.POLICY, version="1.0")
    site.distribution("hexllm-even", site.POLICY, version="0.2")
    policies = load(strict=True).policies
    assert policies.get("fcfs").distribution == "hexllm"
    assert policies.names() == ("even@hexllm-even", "even@hexllm-other", *BUILT_IN)
    assert refusal(PluginError, lambda: policies.get("even")) == (
        "Scheduling policy 'even' is offered by hexllm-even 0.2 and hexllm-other 1.0. "
        "Choose one: --scheduling_policy=even@hexllm-even"
    )
    assert policies.get("even@hexllm-other").distribution == "hexllm-other"
    assert policies.get("even@Hexllm_Other").distribution == "hexllm-other"
    assert refusal(PluginError, lambda: policies.get("even@hexllm-none")) == (
        "Scheduling policy 'even' is not offered by 'hexllm-none'. "
        "Use even@hexllm-even or even@hexllm-other."
    )


def test_a_claim_offered_twice_is_an_error_only_when_chosen(site: Site, load: Load) -> None:
    mine = component("hexllm_model_families", "'mine', 'm:F', ('NewForCausalLM', 'Only')")
    site.distribution("hexllm-mine", mine, version="0.1")
    theirs = component("hexllm_model_families", "'theirs', 't:F', ('NewForCausalLM',)")
    site.distribution("hexllm-theirs", theirs)
    families = load(strict=True).families
    assert families.claimed("Only").component.name == "mine"
    assert refusal(PluginError, lambda: families.claimed("NewForCausalLM")) == (
        "Architecture 'NewForCausalLM' is provided by 'mine' of hexllm-mine 0.1 and 'theirs' of "
        "hexllm-theirs 1.0. Choose one: plugins.prefer=mine@hexllm-mine"
    )
    preferred = load(prefer=["theirs@hexllm_theirs"]).families
    assert preferred.claimed("NewForCausalLM").component.name == "theirs"
    assert "no working plugin offers" in refusal(ConfigError, lambda: load(prefer=["their@x"]))


def test_one_distribution_that_offers_a_name_twice_is_told_to_disable(
    site: Site, load: Load
) -> None:
    site.distribution("hexllm-twice", site.POLICY, entry_point="a")
    site.module("hexllm_second", site.POLICY)
    (site.folder / "hexllm_twice-1.0.dist-info" / "entry_points.txt").write_text(
        "[hexllm]\na = hexllm_twice\nb = hexllm_second\n"
    )
    policies = load().policies
    assert "Disable one: plugins.disable=a" in refusal(PluginError, lambda: policies.get("even"))
    assert load(disable=["a"]).policies.get("even").plugin == "b"


def test_an_unknown_name_lists_the_alternatives_and_who_might_have_offered_it(
    site: Site, load: Load
) -> None:
    site.distribution("hexllm-bad", "import nowhere_at_all", version="0.3", entry_point="bad")
    message = refusal(PluginError, lambda: load().policies.get("fcsf"))
    assert message.startswith("Scheduling policy 'fcsf' is not known. Did you mean 'fcfs'? Known:")
    assert "Plugin 'bad' of hexllm-bad 0.3 might offer it, but is broken: importing" in message


def test_an_unknown_claim_lists_what_is_provided(load: Load) -> None:
    message = refusal(PluginError, lambda: load().loaders.claimed("flie"))
    assert message.startswith("URI scheme 'flie' is not known. Did you mean 'file'? Known:")


def test_build_imports_validates_and_calls(site: Site, load: Load) -> None:
    source = component("hexllm_quantizers", "'q', 'q_impl:Q', options='q_impl:Options'")
    site.distribution("hexllm-q", source)
    site.module("q_impl", OPTIONS + "class Q:\n    def __init__(self, options): self.o = options\n")
    quantizer = load().quantizers.get("q")
    assert quantizer.build(None).o.weight == 1
    assert quantizer.build({"weight": "7"}).o.weight == 7
    assert refusal(ConfigError, lambda: quantizer.build({"wieght": 2})) == (
        "The quantizer 'q' of hexllm-q 1.0 has no option 'wieght'. Did you mean 'weight'? "
        "It takes: tenant and weight."
    )
    message = refusal(ConfigError, lambda: quantizer.build({"weight": -1, "tenant": 3}))
    assert "weight=-1: Input should be greater than or equal to 0" in message
    assert "tenant=3: Input should be a valid string" in message
    assert "[options.q]" in message
    message = refusal(ConfigError, lambda: quantizer.build({"tenant": "nobody"}))
    assert "nobody is no tenant" in message


@pytest.mark.parametrize(
    ("implementation", "options", "reason"),
    [
        ("absent_module:Q", None, "importing absent_module failed: ModuleNotFoundError"),
        ("q_impl:Absent", None, "q_impl has no 'Absent'"),
        ("q_impl:Qq", None, "q_impl has no 'Qq'. Did you mean 'Q'?"),
        ("q_impl:number", None, "q_impl:number is not a class"),
        ("q_impl:Q", "q_impl:Q", "its options q_impl:Q are not a pydantic model"),
        ("q_impl:Q", "q_impl:Nope", "q_impl has no 'Nope'"),
        ("q_impl:Fails", None, "building it failed: KeyError: 'k'"),
        ("exits:Q", None, "importing exits failed: SystemExit: 4"),
    ],
)
def test_an_implementation_that_cannot_be_used_names_its_distribution(
    site: Site, load: Load, implementation: str, options: str | None, reason: str
) -> None:
    source = component("hexllm_quantizers", f"'q', {implementation!r}, options={options!r}")
    site.distribution("hexllm-q", source)
    site.module(
        "q_impl",
        "number = 3\nclass Q: pass\nclass Fails:\n    def __init__(self): raise KeyError('k')\n",
    )
    site.module("exits", "raise SystemExit(4)")
    message = refusal(PluginError, lambda: load().quantizers.get("q").build())
    assert message.startswith("The quantizer 'q' of hexllm-q 1.0 cannot be used: ")
    assert reason in message


def test_options_for_a_component_that_takes_none(load: Load) -> None:
    policy = load().policies.get("fcfs")
    message = refusal(ConfigError, lambda: policy.build({"weight": 1}))
    assert "takes no options; given: weight" in message


def test_a_required_option_that_is_not_given(site: Site, load: Load) -> None:
    source = component("hexllm_quantizers", "'q', 'q_impl:Q', options='q_impl:Options'")
    site.distribution("hexllm-q", source)
    site.module(
        "q_impl",
        "from pydantic import BaseModel\nclass Options(BaseModel):\n    bits: int\n"
        "class Q:\n    def __init__(self, options): pass\n",
    )
    assert "bits: it must be set" in refusal(ConfigError, load().quantizers.get("q").build)


def test_a_policy_that_lacks_a_method_is_refused_when_it_is_built(site: Site, load: Load) -> None:
    site.distribution("hexllm-even", site.POLICY)
    site.module("hexllm_even_impl", "class Even:\n    def next_phase(self, queues): ...\n")
    message = refusal(PluginError, load().policies.get("even").build)
    assert "lacks admission_order, preemption_victim and on_finished()" in message


def test_a_users_mistake_found_by_a_constructor_stays_one(site: Site, load: Load) -> None:
    site.distribution("hexllm-q", component("hexllm_quantizers", "'q', 'q_impl:Q'"))
    site.module(
        "q_impl",
        "from hexllm.core.errors import ConfigError\n"
        "class Q:\n    def __init__(self): raise ConfigError('set X')\n",
    )
    assert refusal(ConfigError, load().quantizers.get("q").build) == "set X"


def test_options_tables_must_be_for_a_component(load: Load) -> None:
    plugins = load()
    plugins.verify_options({"fcfs": {}})
    message = refusal(ConfigError, lambda: plugins.verify_options({"fcsf": {}}))
    assert message.startswith("options.fcsf is for no component of any plugin. Did you mean 'fcfs'")
