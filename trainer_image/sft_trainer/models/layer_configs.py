"""What the layers of a model say that its config has for each of them: Gemma 4's have heads of two sizes.

transformers refuses to read such fields of the config as a whole, by ``getattr`` and ``hasattr`` too.
"""

from typing import Any


def varying(config: Any) -> frozenset[str]:
    """Names of the fields that layers of transformers' ``config`` have values of their own for."""
    return frozenset(getattr(config, "per_layer_attributes", None) or ())


def layer_configs(config: Any) -> list[Any]:
    """That of each layer, in order; ``config`` alone where it says the same of all."""
    return [*config.per_layer_config] if varying(config) else [config]


def config_of_window(config: Any, window: object) -> Any:
    """That of the layers with a sliding ``window``, or of those without one (None).

    Raises ``ValueError`` where these differ among themselves.
    """
    if not varying(config):
        return config
    return config.per_layer_config["full_attention" if window is None else "sliding_attention"]


def head_size(config: Any) -> int:
    """Of queries, in a layer of this ``config``."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def heads_of_keys(config: Any) -> int:
    """In a layer of this ``config``."""
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads
