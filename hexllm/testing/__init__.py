"""The conformance kit: subclass :class:`ModelFamilyTests` to prove a model family.

```python
from hexllm.testing import ModelFamilyTests

class TestMyFamily(ModelFamilyTests):
    family = MyFamily
    hf_config = {"architectures": ["MyForCausalLM"], "model_type": "my", "vocab_size": 97, …}
    configs = {"mqa": {"num_key_value_heads": 1}}
```
"""

import pytest

# Before they are imported, so that their assertions say what was compared, in any repository.
pytest.register_assert_rewrite("hexllm.testing.family", "hexllm.testing.golden")

from hexllm.testing.family import ModelFamilyTests  # noqa: E402
from hexllm.testing.references import Logits  # noqa: E402
from hexllm.testing.steps import Driver  # noqa: E402

__all__ = ["Driver", "Logits", "ModelFamilyTests"]
