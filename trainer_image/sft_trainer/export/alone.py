"""What an export needs when nothing was trained here: the checkpoint, and of the model what its folder consists of."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from sft_api.checkpoints import Manifest
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.workload import ModelSpec
from sft_trainer.checkpoint.store import Store
from sft_trainer.data.tokenizer import load_with_new_tokens
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.digest import base_digest, companion_digests
from sft_trainer.models.text_part import is_part
from sft_trainer.state import changed_companions

from .companions import model_card
from .exporting import Exported
from .forms import Adapters
from .values import Base

Fetch = Callable[[str, Literal["model", "tokenizer"]], Path]
"""From a URI to a local folder with the files of that kind."""


def exported_alone(
    config: TrainerConfig,
    files: ModelSpec,
    store: Store,
    manifest: Manifest,
    fetch: Fetch,
    warn: Callable[[str], None],
) -> Exported:
    """The checkpoint of ``manifest`` in ``store``, to be exported by one process.

    ``files`` says where the model is fetched from; the card names it as ``config`` does. ``warn`` is told of files that
    are not what they were.
    """
    # All weights come from the checkpoint: of the model only what a tokenizer consists of, which its configs are among.
    folder = fetch(files.uri, "tokenizer")
    adapters = Adapters.of(config, files.uri)
    if is_part(folder) and (adapters is None or adapters.form == "model" or adapters.modules or adapters.tokens):
        # What of the whole model was not trained is exported too; and only its files say which weights are tied.
        folder = fetch(files.uri, "model")
    other = files.tokenizer_uri
    tokenizer_folder = fetch(other, "tokenizer") if other else folder
    tokenizer, new_tokens = load_with_new_tokens(tokenizer_folder, files.chat_template, files.new_tokens)
    model = build_on_meta(folder, config.spec.model.config_overrides, new_tokens)
    recorded = (manifest.run.model_extra or {}).get("companions")
    if recorded and (changed := changed_companions(recorded, companion_digests(folder, tokenizer_folder))):
        warn(
            "files beside the weights are not those that this checkpoint was trained with "
            f"({', '.join(changed)}): the model has those of now; pin model.uri to a commit (@revision)"
        )

    def base() -> Base:
        whole = fetch(files.uri, "model")
        return Base(whole, base_digest(model, whole))

    return Exported(
        store=store,
        manifest=manifest,
        model=model,
        folder=folder,
        tokenizer=tokenizer,
        card=model_card(config, manifest, model),
        name=config.job.name,
        base=base,
        adapters=adapters,
    )
