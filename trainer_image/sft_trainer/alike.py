"""Do all processes hold the same? Each makes a fingerprint of what decides its numbers; they are compared once.

Every node fetches, tokenises and reads its configuration by itself: a branch that moved between two downloads, a
volume that holds something else, or an image tag that moved would train a model that nobody asked for.
"""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from sft_api.peft_files import FIELD as ADAPTER_FIELD
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.data import HELD_OUT
from sft_api.v1alpha1.megatron import megatron_of

from .data.tokenizer import Codec
from .distributed import gathered
from .errors import RanksDifferError
from .prepared import Prepared
from .supervisor.identity import code_version

Fingerprint = Mapping[str, str]
"""What was looked at, in the words of the manifest where it has some, and what it is here."""

_LIBRARIES = ("transformers", "tokenizers", "numpy")
_MEGATRON = ("megatron-core",)
_SHOWN = 6
_DIGITS = 16
_VALUE_CHARACTERS = 80


def fingerprint(config: TrainerConfig, prepared: Prepared) -> dict[str, str]:
    """Of this process's data, model, tokenizer, configuration and code."""
    data = config.spec.data
    return {
        **{f"data.train[{i}]": _of_data(data.train[i].uri, source.digest) for i, source in enumerate(prepared.train)},
        **{
            f"data.eval[{source.name}]": _of_data(source.uri, prepared.eval[source.name].digest) for source in data.eval
        },
        **({"data.heldOut": _of_data("rows", prepared.eval[HELD_OUT].digest)} if data.held_out else {}),
        "model.uri": f"{config.spec.model.uri} with {_of_model(prepared)}",
        **_of_adapters(config, prepared),
        "the tokenizer and its chat template": Codec.of(prepared.tokenizer).digest[:_DIGITS],
        "PyTorch": torch.__version__,
        **{name: version(name) for name in (*_LIBRARIES, *(_MEGATRON if megatron_of(config.spec) else ()))},
        "Python": platform.python_version(),
        "the trainer's code": code_version(),
        **{f"the configuration's {path}": value for path, value in _leaves(config.model_dump(mode="json"))},
    }


def check_alike(here: Fingerprint) -> None:
    """Raise ``RanksDifferError``, the same everywhere, unless all processes have the same fingerprint; collective.

    A digest of it goes to all; only when they differ the whole follows.
    """
    digest = hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()
    if len(set(gathered(digest))) > 1:
        raise RanksDifferError(difference(gathered(dict(here))))


def difference(fingerprints: Sequence[Fingerprint]) -> str:
    """What differs between the processes, given by rank, with all values and who has them."""
    names = list(dict.fromkeys(name for each in fingerprints for name in each))
    found = []
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(fingerprints):
            ranks.setdefault(each.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            found.append(f"{name} is " + ", but ".join(f"{value} on {_spans(who)}" for value, who in ranks.items()))
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"the processes do not hold the same: {'; '.join(found[:_SHOWN])}{more}. Pin model.uri, data.*.uri and "
        "lora.adapterUri to a commit (@revision), let all nodes see the same files, and give all pods one image by "
        "its digest"
    )


def _spans(ranks: Sequence[int]) -> str:
    """Ascending ``ranks`` in words: rank 3, or ranks 0-7, 16."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    shown = ", ".join("-".join(map(str, span)) for span in spans[:_SHOWN])
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{' …' if len(spans) > _SHOWN else ''}"


def _of_data(uri: str, digest: str) -> str:
    return f"{uri} with tokens {digest[:_DIGITS]}"


def _of_adapters(config: TrainerConfig, prepared: Prepared) -> dict[str, str]:
    """Of those that the run begins with, if it begins with some."""
    lora, first = config.spec.lora, prepared.model.adapters
    if lora is None or first is None:
        return {}
    return {ADAPTER_FIELD: f"{lora.adapter_uri} with files {first.digest[:_DIGITS]}"}


def _of_model(prepared: Prepared) -> str:
    """The digest of its files, and the revision of one that lies where the hub's library puts it."""
    path = prepared.model.path
    revision = f"revision {path.name}, " if path.parent.name == "snapshots" else ""
    return f"{revision}files {prepared.model.digest[:_DIGITS]}"


def _leaves(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Paths and values of all that is in a nest of dictionaries and lists."""
    if isinstance(value, Mapping) and value:
        return [leaf for key, each in value.items() for leaf in _leaves(each, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list) and value:
        return [leaf for index, each in enumerate(value) for leaf in _leaves(each, f"{path}[{index}]")]
    text = repr(value)
    if len(text) > _VALUE_CHARACTERS:
        text = f"{text[:_VALUE_CHARACTERS]}… ({hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]})"
    return [(path, text)]
