"""``spec.model.configOverrides``: what of a model's config.json may be another in a run, by the names it has there."""

import math
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from .base import ApiModel, Rule

_OF_TYPE = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""What each type of scaling needs."""
_YARN_ALONE = ("attention_factor", "beta_fast", "beta_slow", "truncate")
_BETA_FAST, _BETA_SLOW = 32.0, 1.0
"""What transformers takes where a config does not say."""
_SCALING = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", *_YARN_ALONE)

Positions = Annotated[int, Field(ge=1, le=2**31 - 1)]
Factor = Annotated[float, Field(ge=1, le=1_000_000)]
Positive = Annotated[float, Field(gt=0, le=1_000_000)]
Dropout = Annotated[float, Field(ge=0, lt=1)]


def _has(names: Iterable[str], *, present: bool) -> str:
    return " && ".join(f"{'' if present else '!'}has(self.{name})" for name in names)


def _type_rule(kind: str) -> Rule:
    needed = _OF_TYPE[kind]
    optional = _YARN_ALONE if kind == "yarn" else ()
    others = [name for name in _SCALING if name not in (*needed, *optional)]
    words = f"needs {', '.join(needed)}" if needed else "scales nothing"
    more = f", may have rope_theta{''.join(f', {name}' for name in optional)}, and takes nothing else"

    def check(self: Any) -> bool:
        return self.rope_type != kind or not remedy(self)

    def remedy(self: Any) -> str:
        missing = [name for name in needed if getattr(self, name) is None]
        wrong = [name for name in others if getattr(self, name) is not None]
        give, leave = ", ".join(missing), ", ".join(wrong)
        return " and ".join(filter(None, (give and f"give {give}", leave and f"leave {leave} out")))

    parts = [part for part in (_has(needed, present=True), _has(others, present=False)) if part]
    return Rule(
        f"self.rope_type != '{kind}' || ({' && '.join(parts)})", f"rope_type {kind} {words}{more}", check, remedy=remedy
    )


class RopeParameters(ApiModel):
    """How positions turn queries and keys; in place of the model's own scaling."""

    model_config = ConfigDict(alias_generator=None)

    rope_type: Literal["default", "linear", "yarn", "llama3"] = Field(
        description="How positions are scaled beyond the length that the model was trained with. dynamic and longrope "
        "are no choices: by them the longest document of a micro-batch turns the positions of all."
    )
    factor: Factor | None = Field(default=None, description="How many times longer documents get; 1 or more.")
    original_max_position_embeddings: Positions | None = Field(
        default=None, description="Length that the model was trained with, before it is scaled, in tokens."
    )
    rope_theta: Annotated[float, Field(gt=1, le=1e12)] | None = Field(
        default=None, description="Base of the frequencies; the model's own when absent."
    )
    attention_factor: Annotated[float, Field(ge=0.1, le=10)] | None = Field(
        default=None, description="By which yarn scales queries and keys; follows from the factor when absent."
    )
    beta_fast: Positive | None = Field(default=None, description="Of yarn: from so many turns on nothing is scaled.")
    beta_slow: Positive | None = Field(default=None, description="Of yarn: up to so many turns all is scaled.")
    truncate: bool | None = Field(default=None, description="Of yarn: whether those two bounds are whole dimensions.")
    low_freq_factor: Positive | None = Field(default=None, description="Of llama3: bound of what is scaled wholly.")
    high_freq_factor: Positive | None = Field(default=None, description="Of llama3: bound of what is not scaled.")

    rules: ClassVar[tuple[Rule, ...]] = (
        *(_type_rule(kind) for kind in _OF_TYPE),
        Rule(
            "!has(self.low_freq_factor) || !has(self.high_freq_factor) || self.low_freq_factor < self.high_freq_factor",
            "low_freq_factor must be less than high_freq_factor",
            lambda self: (
                self.low_freq_factor is None
                or self.high_freq_factor is None
                or self.low_freq_factor < self.high_freq_factor
            ),
        ),
        Rule(
            f"(has(self.beta_slow) ? self.beta_slow : {_BETA_SLOW}) < "
            f"(has(self.beta_fast) ? self.beta_fast : {_BETA_FAST})",
            f"beta_slow ({_BETA_SLOW:g} where absent) must be less than beta_fast ({_BETA_FAST:g} where absent)",
            lambda self: (self.beta_slow or _BETA_SLOW) < (self.beta_fast or _BETA_FAST),
        ),
    )

    @property
    def reach(self) -> float:
        """Tokens up to which yarn scales; of other types nothing is said."""
        if self.rope_type != "yarn" or self.factor is None or self.original_max_position_embeddings is None:
            return math.inf
        return self.factor * self.original_max_position_embeddings


class ConfigOverrides(ApiModel):
    """Fields of the model's config.json that are others in this run, and in the model that it exports."""

    model_config = ConfigDict(alias_generator=None)

    rope_parameters: RopeParameters | None = Field(
        default=None, description="Scaling of rotary positions, in place of the model's own."
    )
    max_position_embeddings: Positions | None = Field(
        default=None, description="The longest document that the exported model is said to be for, in tokens."
    )
    sliding_window: Positions | None = Field(
        default=None, description="Tokens that a token sees, in the layers of the model that have a sliding window."
    )
    attention_dropout: Dropout | None = Field(
        default=None, description="Probability with which attention to a token is dropped; on GPUs in fp32 only."
    )
    attention_probs_dropout_prob: Dropout | None = Field(
        default=None, description="The same of attention, by this name."
    )
    hidden_dropout: Dropout | None = Field(default=None, description="The same of a layer's outputs, by this name.")
    hidden_dropout_prob: Dropout | None = Field(
        default=None, description="The same of embeddings and a layer's outputs, by this name."
    )
    resid_pdrop: Dropout | None = Field(default=None, description="The same of a layer's outputs, by this name.")
    residual_dropout: Dropout | None = Field(default=None, description="The same of a layer's outputs, by this name.")
    embd_pdrop: Dropout | None = Field(default=None, description="The same of embeddings, by this name.")
    embedding_dropout: Dropout | None = Field(default=None, description="The same of embeddings, by this name.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.rope_parameters) || self.rope_parameters.rope_type != 'yarn' || "
            "!has(self.max_position_embeddings) || !has(self.rope_parameters.factor) || "
            "!has(self.rope_parameters.original_max_position_embeddings) || "
            "double(self.max_position_embeddings) <= self.rope_parameters.factor * "
            "double(self.rope_parameters.original_max_position_embeddings)",
            "max_position_embeddings must be at most factor * original_max_position_embeddings: so far yarn scales",
            lambda self: (
                self.rope_parameters is None
                or self.max_position_embeddings is None
                or self.max_position_embeddings <= self.rope_parameters.reach
            ),
        ),
    )

    @property
    def given(self) -> dict[str, Any]:
        """The values that are set, by name, as a config.json has them."""
        return self.model_dump(mode="json", exclude_none=True)


DROPOUTS = tuple(name for name in ConfigOverrides.model_fields if "drop" in name)
"""Those fields of overrides that are probabilities of a dropout."""
ATTENTION_DROPOUTS = tuple(name for name in DROPOUTS if name.startswith("attention"))
"""Those of them that are of attention: each architecture that is accepted has one of these names for it."""
