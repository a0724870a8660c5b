"""A trace of some steps, through the whole product."""

import gzip
import json

from tests.integration.run.runs import Place, step_numbers


def test_a_trace_lies_beside_the_checkpoints_and_changes_no_number(place: Place) -> None:
    # Given a run of two processes, and the same under another name with a trace of its second step
    plain, traced = (place.job(name, compute={"gpusPerNode": 0, "processesPerNode": 2}) for name in ("plain", "traced"))
    traced["spec"]["monitoring"] = {"profile": {"startStep": 2, "steps": 1}}
    for job in (plain, traced):
        ended = place.run(job)
        assert ended.code == 0, ended.said
        assert "profile" not in str(ended.status.get("warnings"))

    # Then the first process recorded it, with forward and backward passes
    (trace,) = (place.store("traced") / "profile").iterdir()
    assert trace.name == "step-00000002-a00001.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"aten::mm", "aten::_fused_adamw_"} <= names
    assert any("backward" in str(name).lower() for name in names)
    assert step_numbers(place.store("traced")) == step_numbers(place.store("plain"))
