"""How files hold the module of multi-token prediction (DeepSeek-V3, 2024, §2.2).

It is one more layer of the family, numbered behind the model's own, with a norm of the next token's
embedding, a norm of the model's output, a projection of both and a norm of its own output. A file
may repeat embedding and head, which the module shares with the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyhead.families.common.tensors import Rule


@dataclass(frozen=True)
class PredictorFormat:
    """Where the files of a family hold the module.

    Attributes:
        key: Key of config.json that says how many modules there are.
        modules: The file's names behind ``layers.{number of layers}.``, and polyhead's.
        repeats: Tensors that repeat the model's embedding and head, in the same place.
        appended: What per-layer lists of config.json mean for the module's layer, of which they
            say nothing.
    """

    key: str = "num_nextn_predict_layers"
    modules: Mapping[str, str] = field(
        default_factory=lambda: {
            "enorm": "embedding_norm",
            "hnorm": "hidden_norm",
            "eh_proj": "projection",
            "shared_head.norm": "final_norm",
        }
    )
    repeats: tuple[str, ...] = ("embed_tokens.weight", "shared_head.head.weight")
    appended: Mapping[str, str] = field(default_factory=dict)

    def with_one_more(self, values: Mapping[str, Any], count: int) -> dict[str, Any]:
        """config.json's object, with the first module's layer as the model's last.

        Args:
            values: The object as it is.
            count: Modules in the file.
        """
        layers = values["num_hidden_layers"]
        lists = {
            key: [*values[key], kind]
            for key, kind in self.appended.items()
            if isinstance(values.get(key), list) and len(values[key]) == layers
        }
        return {**values, "num_hidden_layers": layers + 1, self.key: count - 1, **lists}

    def rules(self, layer: int) -> tuple[Rule, ...]:
        """Names of the module's tensors beside those of its layer, which has this number."""
        return tuple(
            Rule(f"layers.{layer}.{theirs}", ours) for theirs, ours in self.modules.items()
        )


BEHIND_LAYERS = PredictorFormat(
    appended={
        "mlp_layer_types": "sparse",
        "layer_types": "indexed_attention",
        "indexer_types": "full",
    }
)
"""DeepSeek-V3's names, which GLM-4.5 and later have too."""
