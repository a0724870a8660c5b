"""What lies beside the weights of an exported model: configs, tokenizer with chat template, model card."""

import json
import logging
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from sft_api.checkpoints import BEST_METRIC, Manifest
from sft_api.place import EXPORT_ADAPTER_CONFIG, EXPORT_CONFIG, form_of
from sft_api.quantised_files import FIELDS
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.model_config import ConfigOverrides
from sft_api.v1alpha1.workload import TrainingSpec
from sft_trainer.data.tokenizer import Codec
from sft_trainer.errors import DISK_FULL, StorageFullError
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.models.experts import has_experts
from sft_trainer.models.lora import stacked_weights
from sft_trainer.models.overrides import in_words
from sft_trainer.models.routers import within_routers
from sft_trainer.models.text_part import Whole

log = logging.getLogger("sft_trainer")

_GENERATION_CONFIG = "generation_config.json"
_OF_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""By which the other parts of a model of several are given images and sounds."""
_OLDER_ROTARY = ("rope_scaling", "rope_theta")
"""Fields that configs had in place of ``rope_parameters``."""
_VOCABULARY = "vocab_size"
"""What is another one too where the run adds tokens."""
_NUMBER_OF_ERROR = re.compile(r"\(os error (\d+)\)")
"""As libraries in Rust tell it, whose exceptions are no OSError."""


def companions(
    model: CausalLM, source: Path, tokenizer: Any, card: str, adapter_config: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """Content by key in the folder, in the order in which they are written: ``EXPORT_CONFIG`` is the last.

    ``source`` is the folder that the model came from; its weights are not needed. ``adapter_config`` is that of
    adapters, which then stands for the model's as ``EXPORT_ADAPTER_CONFIG``.
    """
    huggingface: Any = model.huggingface
    with _scratch() as folder:
        tokenizer.save_pretrained(folder)
        settings = _settings(source / _GENERATION_CONFIG)
        if not settings and huggingface.can_generate() and huggingface.generation_config is not None:
            huggingface.generation_config.save_pretrained(folder)
            settings = json.loads((folder / _GENERATION_CONFIG).read_bytes())
        if settings:
            settings = with_end_of_turn(settings, tokenizer)
            (folder / _GENERATION_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        if adapter_config is None and model.whole is not None:
            config = _with_overrides(_settings(source / EXPORT_CONFIG), model.whole, huggingface.config)
            if model.read_as:
                config = _plain(config)
            (folder / EXPORT_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            for name in _OF_PROCESSORS:
                if (source / name).is_file():
                    (folder / name).write_bytes((source / name).read_bytes())
        elif adapter_config is None:
            huggingface.config.dtype = model.stored_dtype
            # A type that has no class of its own here, as EXAONE 3, has one by its own name for servers.
            if not huggingface.config.architectures or type(huggingface.config) is type(huggingface).config_class:
                huggingface.config.architectures = [type(huggingface).__name__]
            huggingface.config.save_pretrained(folder)
        else:
            (folder / EXPORT_ADAPTER_CONFIG).write_text(json.dumps(adapter_config, indent=2) + "\n")
        for name in (EXPORT_CONFIG, "tokenizer_config.json"):
            _name_no_code(folder / name)
        (folder / "README.md").write_text(card)
        # Of a tokenizer with several chat templates all but the default one lie in a folder of their own.
        names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
        last = (EXPORT_CONFIG, EXPORT_ADAPTER_CONFIG)
        return {name: (folder / name).read_bytes() for name in sorted(names, key=lambda name: (name in last, name))}


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for what libraries write into files only. Raises StorageFullError where it has no room for that."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)
    except Exception as error:
        told = _NUMBER_OF_ERROR.search(str(error))
        number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
        if number not in DISK_FULL:
            raise
        raise StorageFullError(
            f"{tempfile.gettempdir()}: the disk is full ({error}), and the tokenizer of an export is written there "
            "first: free space, or set TMPDIR to another folder"
        ) from error


def _name_no_code(file: Path) -> None:
    """Take out of a config where the model's own code lies: used was that of transformers, and an export has no other.

    Who loads it with trust_remote_code, as servers are often told to, would look for that code and find none.
    """
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    if config.pop("auto_map", None) is not None:
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _with_overrides(published: dict[str, Any], whole: Whole, trained: Any) -> dict[str, Any]:
    """The config of the ``whole`` model as it is ``published``, with what its text part has in that of ``trained``."""
    text = published.get("text_config")
    config = dict(text) if isinstance(text, dict) else dict(published)
    values = trained.to_dict()
    for name in (*ConfigOverrides.model_fields, _VOCABULARY):
        if getattr(whole.config.text_config, name, None) != getattr(trained, name, None):
            config[name] = values[name]
            for older in _OLDER_ROTARY if name == "rope_parameters" else ():
                config.pop(older, None)
    if not isinstance(text, dict):
        return config
    if published.get(_VOCABULARY, 0) == text.get(_VOCABULARY):
        published = {**published, _VOCABULARY: config[_VOCABULARY]}
    return {**published, "text_config": config}


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The ``config`` of a whole model whose files were in FP8, of an export, which is in bf16."""
    inner = {name: _plain(value) if name == "text_config" else value for name, value in config.items()}
    kept = {name: value for name, value in inner.items() if name not in FIELDS}
    return kept | {name: "bfloat16" for name in ("dtype", "torch_dtype") if name in kept}


def _settings(file: Path) -> dict[str, Any]:
    """What a JSON ``file`` of the model says; nothing when there is none, or a broken one."""
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def with_end_of_turn(settings: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Generation settings that stop at the token with which the chat template ends an answer.

    Many base models stop at the end of a text only; one that was trained to end its turn would go on for ever.
    """
    given = settings.get("eos_token_id")
    stops = given if isinstance(given, list) else [] if given is None else [given]
    ends = Codec.of(tokenizer).turn_ends
    added = {token: tokenizer.convert_tokens_to_ids(token) for token in ends}
    added = {token: number for token, number in added.items() if number not in stops}
    if not added:
        return settings
    log.info("%s: added %s, which ends a turn, to eos_token_id %s", _GENERATION_CONFIG, ", ".join(added), given)
    return {**settings, "eos_token_id": [*stops, *added.values()]}


def model_card(config: TrainerConfig, manifest: Manifest, model: CausalLM) -> str:
    """A README.md for ``model`` in a checkpoint, with the facts of the run up to there, as its manifest has them."""
    run = manifest.run
    counted = run.model_extra or {}
    facts = _trained_otherwise(config.spec.training) | {
        "steps": manifest.step,
        "tokens": counted.get("tokens_seen"),
        "trained tokens": counted.get("trained_tokens_seen"),
        "training loss": run.metrics.get("loss"),
        "evaluation loss": run.metrics.get(BEST_METRIC),
        "peak learning rate": config.plan.learning_rate,
    }
    lora, modules = config.spec.lora, config.spec.training.trainable_modules
    if (held_out := config.spec.data.held_out) is not None:
        facts["held out of training"] = f"{held_out.fraction:g} of the rows"
    peft = form_of(config.spec) == "adapter"
    if lora is not None:
        facts["adapters"] = lora.in_words
        if lora.learning_rate_ratio is not None:
            facts["learning rate of B"] = f"{lora.learning_rate_ratio:g} times that of A"
        if lora.adapter_uri is not None:
            facts["adapters began as those of"] = f"`{lora.adapter_uri}`"
        if lora.quantised == "nf4":
            facts["trained beside"] = "weights in 4 bits: " + (
                _in_4_bits(config, model) if peft else "these are as they were rounded, and need no quantisation"
            )
    if modules is not None:
        facts["trained modules"] = ", ".join(f"`{name}`" for name in modules)
    if not config.spec.trains_all:
        facts["digest of the model"] = run.base_digest
    if new := next((table.new for table in model.tables.values()), None):
        facts["added tokens"] = len(new)
    overrides = config.spec.model.config_overrides
    facts |= {f"`{name}`": f"`{value}`" for name, value in (overrides.given if overrides else {}).items()}
    base = "".join(f"base_model: {name}\n" for name in _on_the_hub([config.spec.model.uri]))
    rows_of = "".join(f"- {name}\n" for name in _on_the_hub(source.uri for source in config.spec.data.train))
    base += f"datasets:\n{rows_of}" if rows_of else ""
    sees = model.whole is not None and "vision_config" in model.whole.config.sub_configs
    task = "image-text-to-text" if sees else "text-generation"
    tags = "- sft\n- lora\n" if lora else "- sft\n"
    said = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in facts.items()}
    rows = "\n".join(f"| {key} | {value} |" for key, value in said.items() if value is not None)
    sources = "\n".join(f"- `{source.uri}`" for source in config.spec.data.train)
    return (
        f"---\nlibrary_name: {'peft' if peft else 'transformers'}\n{base}pipeline_tag: {task}\ntags:\n{tags}"
        "---\n\n"
        f"# {config.job.name}\n\nSupervised fine-tuning of `{config.spec.model.uri}` on\n\n{sources}\n\n"
        f"| | |\n|---|---|\n{rows}\n{in_words(overrides, model.whole is not None, _more_rows(model)) if peft else ''}"
    )


def _more_rows(model: CausalLM) -> int:
    """How many rows its base must have for the adapters of ``model``; 0 where it has as many."""
    return next((table.named for table in model.tables.values() if table.named > table.stored), 0)


def _on_the_hub(uris: Iterable[str]) -> list[str]:
    """Names of the repositories among ``uris``, each once: what the hub shows as where a model comes from."""
    return [*dict.fromkeys(uri.removeprefix("hf://").partition("@")[0] for uri in uris if uri.startswith("hf://"))]


def _trained_otherwise(training: TrainingSpec) -> dict[str, str]:
    """What was trained where that is not the cross-entropy of the tokens as they are, and how it was held."""
    facts = {}
    if training.held_dtype == "bf16":
        facts["weights in training"] = "bf16, rounded stochastically"
    if training.optimizer.is_muon:
        facts["optimizer"] = "Muon for matrices of layers, AdamW for all else"
    if training.loss == "dft":
        facts["trained with"] = "cross-entropy times probability (dynamic fine-tuning), as the training loss is"
    if training.label_smoothing:
        facts["label smoothing"] = f"{training.label_smoothing:g}"
    if training.neftune_noise_alpha:
        facts["noise on embeddings"] = f"NEFTune, alpha {training.neftune_noise_alpha:g}"
    return facts


def _in_4_bits(config: TrainerConfig, model: CausalLM) -> str:
    """How transformers loads the model as adapters were trained beside it; left out, bitsandbytes computes in fp32."""
    if config.spec.lora is not None and config.spec.lora.names_experts:
        return (
            "of experts too, beside which peft puts no adapters: these load beside the model as it is, and compute a "
            "little else there; an export with `mergeAdapter` is what was trained"
        )
    computed = {"bf16": "bfloat16", "fp32": "float32"}[config.plan.precision]
    options = f'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="{computed}"'
    if left := _left_as_they_are(model):
        options += f", llm_int8_skip_modules={left!r}"
    loaded = f"`BitsAndBytesConfig({options})`"
    if not has_experts(model.huggingface):
        return loaded
    replace = 'bitsandbytes.nn.parametrize.replace_parameter_4bit(experts, name, quant_type="nf4", blocksize=64)'
    stacked = dict.fromkeys(name.rpartition(".")[2] for name in stacked_weights(model.huggingface))
    besides = f"`{replace}` for {' and '.join(stacked)} of each layer"
    if model.names.packs:
        besides += (
            "; files in MXFP4 take no such config: they are loaded with `Mxfp4Config(dequantize=True)`, and `weight` "
            "of linear layers but the head is replaced as well"
        )
    return f"{loaded}, and experts, which it leaves as they are: {besides}"


def _left_as_they_are(model: CausalLM) -> list[str]:
    """The linear layers that bitsandbytes must be told to leave as they are: ends of their names, or the beginnings.

    Routers that are some, and other parts of a whole model. With these it has to be told the head too; none where it
    leaves all of them by itself.
    """
    huggingface: Any = model.huggingface
    routers = within_routers(huggingface)
    names = {module: name for name, module in huggingface.named_modules() if isinstance(module, nn.Linear)}
    ends = {".".join(names[module].split(".")[-2:]) for module in names.keys() & routers}
    parts = {".".join(name.split(".")[:2]) for name in (model.whole.linear if model.whole else ())}
    head = model.module_of_whole(names[huggingface.get_output_embeddings()])
    return [head, *sorted(ends | parts)] if ends | parts else []
