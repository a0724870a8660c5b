"""SFTJobs for the tests of the CLI."""

from typing import Any

from sft_api.v1alpha1.job import SFTJob


def manifest(**spec: Any) -> dict[str, Any]:
    """A valid manifest on the CPU; ``spec`` replaces whole blocks of its spec."""
    return {
        "apiVersion": "sftjob.dev/v1alpha1",
        "kind": "SFTJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"uri": "hf://org/model"},
            "data": {"train": [{"uri": "hf://org/data"}]},
            "compute": {"gpusPerNode": 0},
            **spec,
        },
    }


def job(**spec: Any) -> SFTJob:
    """The job of ``manifest(**spec)``."""
    return SFTJob.from_manifest(manifest(**spec))
