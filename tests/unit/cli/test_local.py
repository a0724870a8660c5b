"""From an SFTJob to a run on this machine."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sft_api.v1alpha1.job import SFTJob
from sft_cli.errors import UserError
from sft_cli.local import LocalRun, data_out_of_reach, prepare, with_gpu_memory, with_launcher
from sft_cli.run import set_aside

from .jobs import job


def prepared(
    of: SFTJob,
    processes: int | None = None,
    environment: dict[str, str] | None = None,
    gpus: int = 0,
    folder: Path = Path("/w"),
) -> LocalRun:
    return prepare(of, processes=processes, working_folder=folder, environment=environment or {}, gpus=gpus)


def problems(of: SFTJob, **arguments: Any) -> tuple[str, ...]:
    with pytest.raises(UserError) as error:
        prepared(of, **arguments)
    assert error.value.exit_code == 10
    return error.value.problems


def test_all_processes_of_all_nodes_run_on_one() -> None:
    config = prepared(job(compute={"nodes": 2, "gpusPerNode": 4}), gpus=8).config

    assert (config.plan.processes, config.plan.data_parallel, config.plan.shard_degree) == (8, 8, 8)


def test_the_number_of_processes_can_be_given_on_the_cpu() -> None:
    run = prepared(job(compute={"gpusPerNode": 0, "nodes": 4}), processes=2)

    assert run.config.plan.processes == 2
    assert run.config.spec.compute.gpus_per_node == 0
    assert run.notes == ("2 processes instead of the manifest's 4: the steps stay the same.",)


def test_the_number_of_processes_can_be_given_on_gpus() -> None:
    assert prepared(job(compute={"gpusPerNode": 8}), processes=1, gpus=1).config.plan.processes == 1


def test_what_the_plan_leaves_to_memory_follows_from_the_gpus_of_this_machine() -> None:
    def reshards(gpu_memory: str | None, **compute: object) -> bool:
        of = job(model={"uri": "hf://Qwen/Qwen3-4B"}, compute={"gpusPerNode": 2, **compute})
        return prepared(with_gpu_memory(of, gpu_memory), gpus=2).config.plan.reshard_after_forward

    # Given nothing, what the driver says, and a manifest that expects other GPUs than these
    assert reshards(None)
    assert not reshards("143771Mi")
    assert not reshards("143771Mi", gpuMemory="16Gi")
    assert reshards("16384Mi", gpuMemory="140Gi")


@pytest.mark.parametrize(
    "asked",
    [
        job(compute={"gpusPerNode": 0, "processesPerNode": 2}),
        job(
            compute={"gpusPerNode": 0, "processesPerNode": 2}, data={"train": [{"uri": "hf://o/d"}], "packing": "none"}
        ),
        job(training={"globalBatchSize": 4}),
    ],
)
def test_another_number_of_processes_trains_the_same_steps(asked: SFTJob) -> None:
    usual = prepared(asked).config

    for processes in (1, 3, 6):
        other = prepared(asked, processes=processes).config
        assert other.plan.processes == processes
        assert other.numbers() == usual.numbers(), "so the run can be resumed"


def test_a_shard_degree_must_fit_the_processes() -> None:
    asked = job(strategy={"fsdp": {"shardDegree": 2}}, compute={"gpusPerNode": 0, "nodes": 4})

    (problem,) = problems(asked, processes=3)

    assert problem.startswith("spec.strategy.fsdp.shardDegree: 2 does not divide 3 processes: ")


def test_so_must_processes_that_share_tokens() -> None:
    asked = job(strategy={"fsdp": {"sequenceParallelDegree": 2}}, compute={"gpusPerNode": 0, "nodes": 4})

    (problem,) = problems(asked, processes=1)

    assert problem.startswith("spec.strategy.fsdp.sequenceParallelDegree: 2 does not divide 1 process: ")


def test_so_must_matrices_and_stages_of_megatron() -> None:
    asked = job(
        strategy={"megatron": {"contextParallelDegree": 2, "pipelineParallelDegree": 2}},
        compute={"gpusPerNode": 0, "nodes": 4},
    )

    assert prepared(asked, processes=8).config.plan.data_parallel == 2
    (problem,) = problems(asked, processes=6)

    assert problem.startswith(
        "spec.strategy.megatron.tensorParallelDegree x contextParallelDegree x pipelineParallelDegree: 4 does not "
        "divide 6 processes: "
    )


def test_megatron_that_is_not_installed_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = job(strategy={"megatron": {}}, compute={"gpusPerNode": 0})
    assert prepared(asked).config.plan.shard_degree == 1

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    (problem,) = problems(asked)
    assert problem.startswith("spec.strategy.megatron needs Megatron-Core, which is not installed here: ")
    assert prepared(job(compute={"gpusPerNode": 0}))


def test_gpus_that_are_not_there_are_refused_with_what_to_change() -> None:
    assert problems(job(compute={"nodes": 2, "gpusPerNode": 4}), gpus=0) == (
        "this machine has no GPU, and the job asks for 8 (compute.nodes 2 x gpusPerNode 4): set "
        "spec.compute.gpusPerNode: 0 to train on the CPU, or run it where a GPU is",
    )
    (few,) = problems(job(compute={"nodes": 2, "gpusPerNode": 4}), gpus=2)
    assert few.endswith("add --processes 2")


def test_checkpoints_go_below_the_working_folder_unless_the_manifest_says_where() -> None:
    default = prepared(job())
    assert default.config.checkpoint_uri == "file:///w/sft-runs/tiny"
    assert default.config.export_uri == "file:///w/sft-runs/tiny/export"
    assert default.store == Path("/w/sft-runs/tiny")

    elsewhere = prepared(job(checkpoint={"uri": "s3://bucket/runs/a"}))
    assert elsewhere.config.checkpoint_uri == "s3://bucket/runs/a"
    assert elsewhere.store is None
    assert elsewhere.folder == Path("/w/sft-runs/tiny")


def test_the_uid_is_stable_and_belongs_to_the_place_of_the_checkpoints() -> None:
    first, again = prepared(job()), prepared(job(training={"steps": 3}), processes=2)
    other = prepared(job(), folder=Path("/v"))

    assert first.config.job.uid == again.config.job.uid
    assert first.config.job.uid != other.config.job.uid


def test_a_folder_whose_name_is_not_utf_8_asks_for_another_place() -> None:
    folder = Path(os.fsdecode(b"/home/k\xe4se"))

    assert problems(job(), folder=folder) == (
        "the name of the current folder is not UTF-8 (b'/home/k\\xe4se'): run sft in another one, or name another "
        "place in spec.checkpoint.uri",
    )
    assert uid_of("file:///there", folder) == uid_of("file:///there", Path("/w"))
    assert uid_of("s3://bucket/run", folder) != uid_of("s3://bucket/run", Path("/w"))


def uid_of(uri: str, folder: Path) -> str:
    return prepared(job(checkpoint={"uri": uri}), folder=folder).config.job.uid


def test_runs_of_a_bucket_that_may_be_alive_together_have_uids_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two folders of one machine: each has a lock, the bucket has none
    first, second, link = (tmp_path / name for name in ("first", "second", "link"))
    first.mkdir()
    link.symlink_to("first")
    uid = uid_of("s3://bucket/run", first)

    assert uid_of("s3://bucket/run", first) == uid_of("s3://bucket/run", link) == uid, "a restart fences at once"
    assert uid_of("s3://bucket/other", first) != uid
    assert uid_of("s3://bucket/run", second) != uid

    # And two machines of one host name, where the same folder means another one
    monkeypatch.setattr("sft_cli.local._MACHINE_ID", tmp_path / "machine-id")
    without = uid_of("s3://bucket/run", first)
    (tmp_path / "machine-id").write_text("0123456789abcdef\n")
    assert len({uid, without, uid_of("s3://bucket/run", first)}) == 3

    monkeypatch.setattr("socket.gethostname", lambda: "node-7")
    assert uid_of("s3://bucket/run", first) not in (uid, without)


def test_a_folder_for_checkpoints_has_a_lock_so_a_run_of_another_folder_need_not_watch_it(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/checkpoints"

    assert uid_of(uri, tmp_path / "first") == uid_of(uri, tmp_path / "second")


def test_volumes_of_a_cluster_are_refused_wherever_they_stand() -> None:
    found = problems(
        job(
            model={"uri": "pvc://claim/model", "tokenizerUri": "pvc://claim/tokenizer"},
            lora={"adapterUri": "pvc://claim/adapters"},
            data={
                "train": [{"uri": "hf://org/data"}, {"uri": "pvc://claim/b"}],
                "eval": [{"uri": "pvc://claim/c", "name": "c"}],
            },
            checkpoint={"uri": "pvc://claim/d"},
            export={"uri": "pvc://claim/e"},
        )
    )
    found += problems(job(checkpoint={"resume": {"from": {"uri": "pvc://claim/f"}}}))

    assert [problem.split(":")[0] for problem in found] == [
        "spec.model.uri",
        "spec.model.tokenizerUri",
        "spec.lora.adapterUri",
        "spec.data.train[1].uri",
        "spec.data.eval[0].uri",
        "spec.checkpoint.uri",
        "spec.export.uri",
        "spec.checkpoint.resume.from.uri",
    ]
    assert all("file:///" in problem for problem in found)


def test_files_that_are_not_there_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    data = {
        "train": [{"uri": f"file://{tmp_path}/train.jsonl"}],
        "eval": [{"uri": f"file://{tmp_path}/eval.jsonl", "name": "e"}],
    }

    found = problems(job(data=data, checkpoint={"uri": f"file://{tmp_path}/new"}))

    assert found == (
        f"spec.data.eval[0].uri: there is no {tmp_path}/eval.jsonl on this machine: correct the path, or put the "
        "files there",
    )


def test_of_what_showing_rows_does_not_touch_nothing_is_asked() -> None:
    """A job saves in a claim of its cluster, or with a key that only its pods have: its rows are shown anywhere."""
    spec = job(
        model={"uri": "pvc://models/llama", "tokenizerUri": "hf://org/tokenizer", "tokenSecretRef": {"name": "hub"}},
        data={"train": [{"uri": "hf://org/data"}], "eval": [{"name": "e", "uri": "pvc://rows/eval.jsonl"}]},
        checkpoint={"uri": "pvc://runs/x", "s3": {"credentialsSecretRef": "bucket"}},
    ).spec

    assert data_out_of_reach(spec, {"HF_TOKEN": "t"}, evaluation=False) == []
    [login] = data_out_of_reach(spec, {}, evaluation=False)
    assert login.startswith("spec.model.tokenSecretRef: ")
    [claim] = data_out_of_reach(spec, {"HF_TOKEN": "t"}, evaluation=True)
    assert claim.startswith("spec.data.eval[0].uri: pvc://rows/eval.jsonl is a volume of a cluster")

    held_out = job(data={"train": [{"uri": "pvc://rows/train.jsonl"}], "heldOut": {"fraction": 0.05}}).spec
    [claim] = data_out_of_reach(held_out, {}, evaluation=True)
    assert claim.startswith("spec.data.train[0].uri: pvc://rows/train.jsonl is a volume of a cluster")

    stored = job(data={"train": [{"uri": "s3://rows/a.jsonl"}]}, checkpoint={"s3": {"credentialsSecretRef": "b"}}).spec
    [login] = data_out_of_reach(stored, {}, evaluation=False)
    assert login.startswith("spec.checkpoint.s3.credentialsSecretRef: ")


def test_of_what_a_dummy_run_does_not_touch_nothing_is_asked(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "data": {"train": [{"uri": "pvc://claim/b"}], "eval": [{"uri": f"file://{tmp_path}/eval.jsonl", "name": "e"}]},
        "checkpoint": {"uri": "pvc://claim/d", "resume": {"from": {"uri": f"file://{tmp_path}/absent"}}},
        "export": {"uri": "pvc://claim/e"},
        "training": {"dummyRun": {"steps": 3}},
    }

    assert prepared(job(**sections)).is_dummy
    (found,) = problems(job(**sections, model={"uri": f"file://{tmp_path}/model"}))
    assert found.startswith(f"spec.model.uri: there is no {tmp_path}/model on this machine")


def test_the_export_is_not_written_over_the_model_it_came_from(tmp_path: Path) -> None:
    exported = tmp_path / "sft-runs" / "tiny" / "export"
    exported.mkdir(parents=True)
    (tmp_path / "latest").symlink_to(exported)

    for read in (exported, tmp_path / "latest"):
        (problem,) = problems(job(model={"uri": f"file://{read}"}), folder=tmp_path)
        assert problems(job(lora={"adapterUri": f"file://{read}"}), folder=tmp_path) == (problem,)
        assert problem.startswith("spec: export.uri (export/ in checkpoint.uri when absent) must be neither model.uri")
        assert problem.endswith(f"; checkpoints go to file://{tmp_path}/sft-runs/tiny")
    prepared(job(model={"uri": f"file://{exported}"}, export={"atEnd": False}), folder=tmp_path)


def test_the_export_is_not_written_among_the_data_by_way_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "rows")

    (problem,) = problems(
        job(
            data={"train": [{"uri": f"file://{tmp_path}/rows"}]},
            export={"uri": f"file://{tmp_path}/link/out"},
        )
    )

    assert "the export would be written among the data" in problem


SECRETS = {
    "model": {"uri": "hf://org/model", "tokenSecretRef": {"name": "hub"}},
    "checkpoint": {"uri": "s3://bucket/a", "s3": {"credentialsSecretRef": "store"}},
    "compute": {
        "gpusPerNode": 0,
        "env": [
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}},
            {"name": "PLAIN", "value": "1"},
        ],
    },
}


def test_values_of_secrets_must_be_in_the_shell() -> None:
    hub, store, key = problems(job(**SECRETS))

    assert "Secret hub" in hub
    assert "HF_TOKEN" in hub
    assert "Secret store" in store
    assert "AWS_ACCESS_KEY_ID" in store
    assert key == "spec.compute.env KEY: there is no cluster to read its value from: set KEY in this shell"


def test_an_upload_needs_a_token_where_a_run_makes_one() -> None:
    hub = {"export": {"hub": {"repository": "org/mine"}}}
    (problem,) = problems(job(**hub))
    assert problem == (
        "spec.export.hub: nobody may write to org/mine without a token: set HF_TOKEN in this shell, or log in with hf "
        "auth login"
    )
    prepared(job(**hub), environment={"HF_TOKEN": "t"})
    prepared(job(training={"dummyRun": {}}, **hub))
    assert data_out_of_reach(job(**hub).spec, {}, evaluation=False) == []


def test_values_of_secrets_are_taken_from_the_shell_and_named() -> None:
    run = prepared(job(**SECRETS), environment={"HF_TOKEN": "t", "AWS_ACCESS_KEY_ID": "i", "KEY": "k"})

    assert run.environment == {"PLAIN": "1"}
    assert " ".join(run.notes) == (
        "hf:// is read with HF_TOKEN of this shell (or the token of hf auth login). s3:// is reached with the AWS_* "
        "variables or profile of this shell. Taken from this shell: KEY."
    )
    assert "t" not in run.config.model_dump_json().split('"')


def test_a_deadline_that_nobody_keeps_here_is_said() -> None:
    assert prepared(job(compute={"gpusPerNode": 0}, runPolicy={"activeDeadlineSeconds": 60})).notes == (
        "spec.runPolicy.activeDeadlineSeconds says nothing here: the run takes as long as it takes.",
    )


def test_a_profile_of_the_cluster_that_nobody_reads_here_is_said() -> None:
    assert prepared(job(compute={"gpusPerNode": 0, "podProfile": "h100"})).notes == (
        "spec.compute.podProfile: h100 says nothing here: what it gives pods is the cluster's.",
    )


def test_logins_of_this_machine_do_as_well(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "token").write_text("t")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]")

    prepared(job(**SECRETS), environment={"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hub"), "KEY": "k"})


@pytest.mark.parametrize(
    ("environment", "token"),
    [
        ({"HOME": "{}"}, ".cache/huggingface/token"),
        ({"HOME": "{}", "XDG_CACHE_HOME": "{}/cache"}, "cache/huggingface/token"),
        ({"HOME": "{}", "HF_HOME": "~/hub"}, "hub/token"),
        ({"HUGGING_FACE_HUB_TOKEN": "t"}, "nothing"),
    ],
)
def test_the_login_of_the_hub_is_where_its_library_keeps_it(
    tmp_path: Path, environment: dict[str, str], token: str
) -> None:
    (tmp_path / token).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / token).write_text("t")
    here = {name: value.format(tmp_path) for name, value in environment.items()}

    prepared(job(**SECRETS), environment={"AWS_ACCESS_KEY_ID": "i", "KEY": "k", **here})


@pytest.mark.parametrize(
    "variable",
    [
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_CONFIG_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    ],
)
def test_so_does_a_role_of_the_pod_that_the_shell_runs_in(variable: str) -> None:
    prepared(job(**SECRETS), environment={"HF_TOKEN": "t", "KEY": "k", variable: "x"})


def test_so_does_a_profile_without_keys(tmp_path: Path) -> None:
    """As aws configure sso writes it, and one that names a program."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text("[default]\ncredential_process = keys")

    prepared(job(**SECRETS), environment={"HF_TOKEN": "t", "KEY": "k", "HOME": str(tmp_path)})


def test_another_launcher_can_be_asked_for() -> None:
    given = job(compute={"gpusPerNode": 0})

    assert with_launcher(given, "ray").spec.compute.launcher == "ray"
    assert with_launcher(given, None) == given


def test_ray_that_is_not_installed_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(UserError, match="here Ray is not installed: pip install"):
        with_launcher(job(compute={"gpusPerNode": 0, "launcher": "ray"}), None)
    assert with_launcher(job(compute={"gpusPerNode": 0, "launcher": "ray"}), "supervisor")


def test_runs_that_are_set_aside_within_one_second_have_names_of_their_own(tmp_path: Path) -> None:
    run, now = prepared(job(), folder=tmp_path), datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    store = run.store
    assert store is not None
    for earlier in range(3):
        store.mkdir(parents=True)
        (store / "checkpoint").write_text(str(earlier))
        set_aside(run, now)

    until = f"{store.name}-until-20260102-030405"
    kept = {folder.name: (folder / "checkpoint").read_text() for folder in store.parent.iterdir()}
    assert kept == {until: "0", f"{until}-2": "1", f"{until}-3": "2"}
