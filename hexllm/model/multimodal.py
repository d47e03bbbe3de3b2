"""The language model of a multimodal checkpoint: which keys and tensors hexllm leaves out.

Its configuration is under ``text_config`` (``HfConfig.language_model``) and its tensors under a
prefix; the weights of the other modalities are dropped, on purpose and said so.
"""

from __future__ import annotations

from hexllm.model.rules import Drop, Rename, Rule

#: Keys of the outermost mapping that only images are concerned by.
MULTIMODAL_KEYS = frozenset(
    [
        "boi_token_id",
        "boi_token_index",
        "eoi_token_id",
        "eoi_token_index",
        "image_token_id",
        "image_token_index",
        "mm_tokens_per_image",
        "multimodal_projector_bias",
        "projector_hidden_act",
        "spatial_merge_size",
        "vision_config",
        "vision_feature_layer",
    ]
)

#: Weights of images, and the prefix of the language model's own: ``language_model.model.`` in the
#: files of the hub, ``model.language_model.`` in memory and in files of transformers 4.52 to 4.57.
MULTIMODAL_RULES: tuple[Rule, ...] = (
    Drop(
        r"(model\.)?(vision_tower|vision_model|multi_modal_projector)\..*",
        reason="images are not served",
    ),
    Rename(r"^model\.language_model\.", "model."),
    Rename(r"^language_model\.", ""),
)
