"""Real data and a real, very small model for tests, made by examples/make_inputs.py."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT = EXAMPLES / "make_inputs.py"

# Scripts that import one another as they do when one of them is run: examples/ is not a package.
sys.path.insert(0, str(EXAMPLES))
make_inputs_script: Any = importlib.import_module("make_inputs")
make_inputs = make_inputs_script.make_inputs


@pytest.fixture(scope="session")
def tiny_inputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An `Inputs`: paths `model`, `train`, `eval`, `alpaca`. Shared by the session: read, never change."""
    return make_inputs(tmp_path_factory.mktemp("tiny_inputs"), size="tiny")
