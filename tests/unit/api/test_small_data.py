"""Data that is small beside a step is told with the value to set, and the value works."""

import math
from typing import Any

import pytest

from sft_api.small_data import small_data_warning
from sft_api.v1alpha1.job import SFTJobSpec


def spec(**sections: Any) -> SFTJobSpec:
    document: dict[str, Any] = {
        "model": {"uri": "hf://org/model"},
        "data": {"train": [{"uri": "hf://org/data"}]},
        "compute": {"gpusPerNode": 0},
    }
    for section, fields in sections.items():
        document[section] = {**document.get(section, {}), **fields}
    return SFTJobSpec.model_validate(document)


@pytest.mark.parametrize(
    ("asked", "rows", "step_rows", "total_steps", "sentence"),
    [
        (spec(training={"steps": 3}), 3, 768, 3, "every step holds all 3 rows 256 times: set training.globalBatchSize: "
         "1 for 3 steps a pass over the data"),
        (spec(training={"epochs": 2}), 40, 80, 1, "every step holds all 40 rows 2 times: set training.globalBatchSize: "
         "4 for 10 steps a pass over the data"),
        (spec(), 1000, 1000, 1, "one step holds all 1,000 rows, and the run is that one step: set "
         "training.globalBatchSize: 100 for 10 steps a pass over the data"),
        (spec(training={"epochs": 9}), 30, 40, 7, "every step holds all 30 rows once and some of them again: set "
         "training.globalBatchSize: 3 for 10 steps a pass over the data"),
        (spec(training={"globalBatchTokens": 8192}), 9, 90, 1, "every step holds all 9 rows 10 times: set "
         "training.globalBatchSize: 1 instead of globalBatchTokens for 9 steps a pass over the data"),
        (spec(compute={"gpusPerNode": 8}), 5, 50, 1, "every step holds all 5 rows 10 times: train on more rows, or on "
         "fewer than 8 processes"),
        (spec(), 1, 500, 1, "every step holds the only row 500 times: train on more rows"),
    ],
)  # fmt: skip
def test_it_says_what_happens_and_what_to_set(
    asked: SFTJobSpec, rows: int, step_rows: int, total_steps: int, sentence: str
) -> None:
    assert small_data_warning(asked, rows=rows, step_rows=step_rows, total_steps=total_steps) == sentence


def test_an_estimate_says_so() -> None:
    warning = small_data_warning(spec(), rows=3, step_rows=700.2, total_steps=None, estimated=True)
    assert warning is not None
    assert warning.startswith("every step holds all 3 rows about 233 times: ")


@pytest.mark.parametrize(
    ("asked", "rows", "step_rows", "total_steps"),
    [
        (spec(), 1000, 999, 2),
        (spec(training={"steps": 50}), 1000, 1000, 50),
        (spec(training={"steps": 1}), 10, 20, 1),
        (spec(), 1000, 300, None),
    ],
)
def test_what_may_be_meant_is_not_warned_of(
    asked: SFTJobSpec, rows: int, step_rows: int, total_steps: int | None
) -> None:
    assert small_data_warning(asked, rows=rows, step_rows=step_rows, total_steps=total_steps) is None


@pytest.mark.parametrize("rows", [17, 40, 999])
@pytest.mark.parametrize("packing", ["none", "ffd"])
def test_the_value_is_one_that_the_api_takes(rows: int, packing: str) -> None:
    document: dict[str, Any] = {
        "data": {"train": [{"uri": "hf://org/data"}], "packing": packing},
        "compute": {"gpusPerNode": 4},
        "training": {"microBatchSize": 2} if packing == "none" else {},
    }
    warning = small_data_warning(spec(**document), rows=rows, step_rows=2 * rows, total_steps=1)

    assert warning is not None
    size = int(warning.split("globalBatchSize: ")[1].split()[0])
    document["training"]["globalBatchSize"] = size
    assert spec(**document).training.global_batch_size == size
    assert warning.endswith(f" for {math.ceil(rows / size)} steps a pass over the data")
