"""Files of adapters that a run begins with (``lora.adapterUri``), judged without torch: for the look before it, too."""

from collections.abc import Collection
from pathlib import Path

from sft_api.layers import linear_of
from sft_api.model_config import content_of_config, shape_of
from sft_api.peft_files import FIELD, AdapterFilesError, PeftFiles
from sft_api.v1alpha1.job import SFTJobSpec
from sft_api.v1alpha1.lora import LoraSpec

from .errors import ConfigError, ModelError


def read_adapters(
    folder: Path,
    uri: str,
    lora: LoraSpec,
    linear: Collection[str] | None = None,
    adapted: Collection[str] | None = None,
) -> PeftFiles:
    """Those in ``folder``, which came from ``uri``, found to be those that ``lora`` trains (``PeftFiles.problem``).

    Raises ``ModelError`` for files that no run can begin with, ``ConfigError`` where this one has other adapters.
    """
    try:
        files = PeftFiles.read(folder)
        problem = files.problem(lora, linear, adapted)
    except AdapterFilesError as error:
        raise ModelError(f"{uri}, which {FIELD} names: {error}") from error
    if problem:
        raise ConfigError(f"{uri}, which {FIELD} names: {problem}")
    return files


def layers_by_config(model: Path, spec: SFTJobSpec) -> tuple[list[str], list[str]] | tuple[None, None]:
    """Full names of the linear layers of the model whose config.json is in the folder ``model``, and of those that
    ``spec`` means; None where the layers of its kind are not known without building it."""
    shape = shape_of(content_of_config(model))
    return (None, None) if shape is None else linear_of(shape, spec)
