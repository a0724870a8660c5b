"""``strategy.megatron.transformerConfigOverrides``: what Megatron-Core is told otherwise, by the names it has there."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from .base import ApiModel

Layers = Annotated[int, Field(ge=1, le=1024)]

OF_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "batch_p2p_comm",
    "deallocate_pipeline_outputs",
)
"""What says nothing where there is one stage."""


class TransformerConfigOverrides(ApiModel):
    """Fields of Megatron-Core's TransformerConfig that are others than what follows from the model and the degrees."""

    model_config = ConfigDict(alias_generator=None)

    num_layers_in_first_pipeline_stage: Layers | None = Field(
        default=None,
        description="Layers of the first stage, which has the embedding too. Those that are left to the other stages "
        "are shared out evenly.",
    )
    num_layers_in_last_pipeline_stage: Layers | None = Field(
        default=None,
        description="Layers of the last stage, which has the head and the loss too. Those that are left to the other "
        "stages are shared out evenly.",
    )
    batch_p2p_comm: bool | None = Field(
        default=None,
        description="Whether hidden states and gradients that a stage sends and receives at the same time are one call "
        "of the network's library, or one for each; their shapes go together in any case. true when absent.",
    )
    deallocate_pipeline_outputs: bool | None = Field(
        default=None,
        description="Whether a stage forgets what it has sent on: less memory of activations. true when absent.",
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = Field(
        default=None,
        description="Precision in which the logits of routers are computed, by which they choose experts; that of the "
        "model when absent. A number of the run.",
    )

    @property
    def given(self) -> dict[str, Any]:
        """The values that are set, by name."""
        return self.model_dump(mode="json", exclude_none=True)
