"""What a process of the trainer does not import."""

import subprocess
import sys


def test_neither_the_trainer_nor_these_rules_import_megatron() -> None:
    """It takes seconds, and most images do not have it."""
    program = (
        "import sys, sft_trainer.trainer, sft_trainer.strategies.megatron.refused, "
        "sft_trainer.strategies.megatron.layout; sys.exit(any(name.startswith('megatron') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
