"""Rows become the tokens, and are trained as, docs/data.md says: in every format, with every choice beside it."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sft_api.v1alpha1 import SFTJob
from sft_trainer.data.examples import mark_row, to_examples
from sft_trainer.data.tokenize import settings_of
from sft_trainer.data.tokenizer import Codec, load_tokenizer

from .features import features, manifest
from .inputs import write_rows
from .rows import Example, examples, rows_of, tokenizer_of

_FEATURES = features(Path("/inputs"))
_ROWS = 14


@pytest.fixture(scope="module")
def data(tiny_inputs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder / "data", tiny_inputs, _ROWS)
    return folder


@pytest.mark.parametrize("tokens", ["none", "one"])
@pytest.mark.parametrize("template", _FEATURES["template"])
@pytest.mark.parametrize("trained", _FEATURES["trained turns"])
def test_rows_become_what_is_documented(tokens: str, template: str, trained: str, data: Path, tiny_inputs: Any) -> None:
    values = features(data)
    model = {"model": {"uri": f"file://{tiny_inputs.model}"}, "training": {"steps": 1}}
    common = [model, values["new tokens"][tokens], values["template"][template], values["trained turns"][trained]]
    spec = SFTJob.from_manifest(manifest([*common, values["rows"]["messages"]], 1)).spec
    plain = tokenizer_of(manifest(common, 1)["spec"])
    codec = Codec.of(load_tokenizer(tiny_inputs.model, spec.model.chat_template, spec.model.new_tokens))

    for form, rows in values["rows"].items():
        if (form, trained) == ("flagged", "everything"):  # refused: all of the text is trained
            continue
        for length, limits in values["length"].items():
            job = manifest([*common, rows, limits], 1)
            written = job["spec"]["data"]["train"]
            wanted = sum((examples(job["spec"], source, plain) for source in written), Counter[Example]())

            assert _by_the_trainer(job, codec) == wanted, (form, length)
            assert wanted


def _by_the_trainer(job: dict[str, Any], codec: Codec) -> Counter[Example]:
    data, found = SFTJob.from_manifest(job).spec.data, Counter[Example]()
    for source, written in zip(data.train, job["spec"]["data"]["train"], strict=True):
        rows = rows_of(written)
        settings = settings_of(rows[0].keys(), source, data, rows[0])
        marked = (mark_row(str(at), row, settings, codec) for at, row in enumerate(rows))
        for example in to_examples([row for row in marked if row is not None], codec):
            found.update(((*ids,), (*mask.tolist(),)) for ids, mask in example.pieces(settings))
    return found
