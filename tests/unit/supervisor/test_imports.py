"""What every start of a pod waits for."""

import subprocess
import sys


def test_a_supervisor_starts_without_what_reads_stores_and_the_hub() -> None:
    code = "import sys, sft_trainer.supervisor.node; print([*sys.modules])"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    for heavy in ("torch", "boto3", "sft_trainer.fetch", "sft_trainer.checkpoint.store"):
        assert f"'{heavy}'" not in imported
