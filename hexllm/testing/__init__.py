"""The conformance kit: classes of tests to inherit, for a model family or a scheduling policy.

```python
from hexllm.testing import ModelFamilyTests, SchedulingPolicyTests

class TestMyFamily(ModelFamilyTests):
    family = MyFamily
    hf_config = {"architectures": ["MyForCausalLM"], "model_type": "my", "vocab_size": 97, …}
    configs = {"mqa": {"num_key_value_heads": 1}}

class TestMyPolicy(SchedulingPolicyTests):
    policy = MyPolicy
```
"""

import pytest

# Before they are imported, so that their assertions say what was compared, in any repository.
pytest.register_assert_rewrite(
    "hexllm.testing.family", "hexllm.testing.golden", "hexllm.testing.policies"
)

from hexllm.testing.family import ModelFamilyTests  # noqa: E402
from hexllm.testing.policies import SchedulingPolicyTests  # noqa: E402
from hexllm.testing.references import Logits  # noqa: E402
from hexllm.testing.steps import Driver  # noqa: E402

__all__ = ["Driver", "Logits", "ModelFamilyTests", "SchedulingPolicyTests"]
