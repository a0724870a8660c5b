"""From an SFTJob to a run on this machine: everything is decided here, before anything is started."""

import hashlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sft_api import ray
from sft_api.dummy_run import FOLDER as DUMMY_RUN_FOLDER
from sft_api.goodput import Devices
from sft_api.megatron import MISSING, is_installed
from sft_api.spec_uris import uris_of
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.base import ApiModel
from sft_api.v1alpha1.job import SFTJob, SFTJobSpec
from sft_api.v1alpha1.megatron import WITH_THE_SAME_DATA_IN_WORDS, megatron_of
from sft_api.v1alpha1.places import PLACE_RULES

from .errors import UserError
from .files import FILE_SCHEME, absent, path_of
from .hub_folders import HUB_LOGINS, hub_token_file
from .words import counted

CONFIG_FILE = "config.json"
"""In the folder of a run on this machine: its resolved configuration."""
_MACHINE_ID = Path("/etc/machine-id")
Part = TypeVar("Part", bound=ApiModel)


@dataclass(frozen=True)
class LocalRun:
    """A run on this machine."""

    config: TrainerConfig
    environment: dict[str, str]
    """What ``compute.env`` adds to the environment of this shell."""
    notes: tuple[str, ...]
    """What is taken from this machine instead of the cluster, a sentence each."""
    folder: Path
    """Where config, logs and (unless the manifest says otherwise) checkpoints are."""

    @property
    def store(self) -> Path | None:
        """The folder of the checkpoints, or None when there are none, or not on this machine."""
        uri = self.config.checkpoint_uri
        return None if self.is_dummy else path_of(uri)

    @property
    def is_dummy(self) -> bool:
        """Whether nothing is trained, and nothing saved (``training.dummyRun``)."""
        return self.config.spec.training.dummy_run is not None


def with_launcher(job: SFTJob, launcher: str | None) -> SFTJob:
    """``job`` with another ``launcher`` than the manifest's, if one is given. Raises UserError where Ray is missing, or
    is one that cannot be used."""
    if launcher is not None:
        spec = job.spec.model_copy(update={"compute": job.spec.compute.model_copy(update={"launcher": launcher})})
        job = job.model_copy(update={"spec": spec})
    if job.spec.compute.launcher == "ray" and (missing := ray.what_is_missing()):
        raise UserError(
            f"spec.compute.launcher is ray, and here {missing}: pip install 'ray[train]==2.60.0', or add "
            "--launcher supervisor, with which the numbers are the same"
        )
    return job


def with_gpu_memory(job: SFTJob, gpu_memory: str | None) -> SFTJob:
    """``job`` on GPUs of this ``gpu_memory`` (a quantity; None: nobody knows), whatever the manifest expects of others.

    What the plan leaves to memory follows from it: how long weights stay gathered, how often gradients are summed.
    """
    if gpu_memory is None:
        return job
    compute = job.spec.compute.model_copy(update={"gpu_memory": gpu_memory})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"compute": compute})})


def prepare(
    job: SFTJob, *, processes: int | None, working_folder: Path, environment: Mapping[str, str], gpus: int
) -> LocalRun:
    """The run of ``job`` on a machine with ``gpus`` GPUs and this ``environment``.

    Raises UserError with all that cannot work here.
    """
    folder = _folder(working_folder, job)
    if job.spec.training.dummy_run:
        # Its log lies beside that of the run, which is not its own.
        folder = folder.with_name(f"{folder.name}-{DUMMY_RUN_FOLDER}")
    problems = [*out_of_reach(job.spec, environment), *_missing_variables(job.spec, environment)]
    count = processes or job.spec.compute.processes
    problems += [*_missing_gpus(job.spec, count, gpus), *_odd_shards(job.spec, count), *_no_megatron(job.spec)]
    uri = (job.spec.checkpoint.uri or local_checkpoints(working_folder, job)).rstrip("/")
    problems += overwritten(job.spec, uri)
    if problems:
        raise UserError(*problems)
    return LocalRun(
        config=TrainerConfig.resolve(job, uid=local_uid(uri, folder), default_checkpoint_uri=uri, processes=count),
        environment={variable.name: variable.value for variable in job.spec.compute.env if variable.value is not None},
        notes=tuple(_notes(job.spec, count)),
        folder=folder,
    )


def runs_folder(working_folder: Path) -> Path:
    """Where all runs of a folder are, each by its name."""
    return working_folder / "sft-runs"


def _folder(working_folder: Path, job: SFTJob) -> Path:
    return runs_folder(working_folder) / job.metadata.name


def local_checkpoints(working_folder: Path, job: SFTJob) -> str:
    """Where checkpoints go when ``job`` does not say. Raises UserError where the folder's name cannot be written."""
    uri = f"{FILE_SCHEME}{_folder(working_folder, job)}"
    try:
        uri.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"the name of the current folder is not UTF-8 ({os.fsencode(working_folder)!r}): run sft in another one, "
            "or name another place in spec.checkpoint.uri"
        ) from None
    return uri


def local_devices(config: TrainerConfig) -> Devices:
    """What the time of a run on this machine is counted in: one GPU, or none, for every process."""
    return Devices("GPUs" if config.spec.compute.gpus_per_node else "Processes", config.plan.processes, 1)


def out_of_reach(spec: SFTJobSpec, environment: Mapping[str, str]) -> list[str]:
    """What model, data and stores of ``spec`` would need a cluster, another path or a login for; a sentence each."""
    uris = _uris(spec)
    return [*_claims(uris), *_missing_files(uris), *missing_logins(spec, environment)]


def data_out_of_reach(spec: SFTJobSpec, environment: Mapping[str, str], *, evaluation: bool) -> list[str]:
    """``out_of_reach``, of what reading the training sets alone needs, or the evaluation sets: these and the tokenizer.

    The job may save in a claim of its cluster, or in a bucket that this shell has no key for.
    """
    tokenizer = "spec.model.tokenizerUri" if spec.model.tokenizer_uri else "spec.model.uri"
    # Rows that are held out of training sets are evaluated on.
    sets = {"train"} if not evaluation else {"eval", *(["train"] if spec.data.held_out else [])}
    begin = tuple(f"spec.data.{name}[" for name in sets)
    read = {path: uri for path, uri in _uris(spec).items() if path == tokenizer or path.startswith(begin)}
    logins = missing_logins(spec, environment, [*read.values()])
    return [*_claims(read), *_missing_files(read), *logins]


def local_uid(checkpoint_uri: str, folder: Path) -> str:
    """What stands for the uid of an SFTJob object: of all that can start for a place here, but only one at a time.

    Of two runs of one uid the later fences the earlier at once; those of others watch for each other first. So two that
    may be alive together must never share it: each would fence the other again and again. A ``file://`` place has a
    lock for this machine; elsewhere the run's ``folder``, which has one too, tells them apart.
    """
    locked = checkpoint_uri.startswith(FILE_SCHEME)
    here = [socket.gethostname(), _machine_id(), *([] if locked else [str(folder.resolve())]), checkpoint_uri]
    return "local-" + hashlib.sha256("\n".join(here).encode(errors="surrogateescape")).hexdigest()[:16]


def _machine_id() -> str:
    """Tells machines of the same host name apart; empty where this one has none, as in many containers."""
    try:
        return _MACHINE_ID.read_text(errors="replace").strip()
    except OSError:
        return ""


def _uris(spec: SFTJobSpec) -> dict[str, str]:
    """Every URI that the run reads or writes, by its path in the manifest; of a dummy run those of its model."""
    uris, of_model = uris_of(spec), ("model.", "lora.") if spec.training.dummy_run else ""
    return {f"spec.{path}": uri for path, uri in uris.items() if path.startswith(of_model)}


def _claims(uris: Mapping[str, str]) -> Iterator[str]:
    for path, uri in uris.items():
        if uri.startswith("pvc://"):
            yield f"{path}: {uri} is a volume of a cluster, which this machine has not: use file:///absolute/path"


def _missing_files(uris: Mapping[str, str]) -> Iterator[str]:
    for path, file in absent(uris).items():
        if path not in ("spec.checkpoint.uri", "spec.export.uri"):  # these are written
            yield f"{path}: there is no {file} on this machine: correct the path, or put the files there"


def overwritten(spec: SFTJobSpec, checkpoint_uri: str) -> Iterator[str]:
    """Which of what the job is made of it would write into, also by way of a link; a sentence each."""

    def real(uri: str) -> str:
        return f"{FILE_SCHEME}{path.resolve()}" if (path := path_of(uri)) else uri

    def placed(part: Part, name: str = "uri") -> Part:
        uri = getattr(part, name)
        return part.model_copy(update={name: real(uri)}) if uri else part

    data = {"train": [placed(source) for source in spec.data.train], "eval": [placed(item) for item in spec.data.eval]}
    resume = spec.checkpoint.resume
    if resume.origin:
        resume = resume.model_copy(update={"origin": placed(resume.origin)})
    here = spec.model_copy(
        update={
            "model": placed(placed(spec.model), "tokenizer_uri"),
            "lora": spec.lora and placed(spec.lora, "adapter_uri"),
            "data": spec.data.model_copy(update=data),
            "export": placed(spec.export),
            "checkpoint": spec.checkpoint.model_copy(update={"uri": real(checkpoint_uri), "resume": resume}),
        }
    )
    for rule in PLACE_RULES:
        if not rule.check(here):
            yield f"spec: {rule.message}; checkpoints go to {checkpoint_uri}"


def _missing_gpus(spec: SFTJobSpec, processes: int, gpus: int) -> Iterator[str]:
    wanted = processes if spec.compute.gpus_per_node else 0
    if wanted <= gpus:
        return
    given = f"compute.nodes {spec.compute.nodes} x gpusPerNode {spec.compute.gpus_per_node}"
    if gpus == 0:
        yield (
            f"this machine has no GPU, and the job asks for {wanted} ({given}): set spec.compute.gpusPerNode: 0 to "
            "train on the CPU, or run it where a GPU is"
        )
    else:
        here = counted(gpus, "GPU")
        yield f"this machine has {here}, and the job asks for {wanted} ({given}): add --processes {gpus}"


def _odd_shards(spec: SFTJobSpec, processes: int) -> Iterator[str]:
    megatron = megatron_of(spec)
    degrees = [
        ("fsdp.shardDegree", spec.fsdp.shard_degree),
        ("fsdp.sequenceParallelDegree", spec.sequence_parallel),
    ]
    if megatron is not None:
        pipeline, expert = megatron.pipeline_parallel_degree, megatron.expert_parallel_degree
        degrees = [
            (f"megatron.{WITH_THE_SAME_DATA_IN_WORDS}", megatron.with_the_same_data),
            ("megatron.pipelineParallelDegree x expertParallelDegree", pipeline * expert),
        ]
    for name, degree in degrees:
        if degree and processes % degree:
            yield (
                f"spec.strategy.{name}: {degree} does not divide {counted(processes, 'process')}: leave it out, "
                "or choose other --processes"
            )


def _no_megatron(spec: SFTJobSpec) -> Iterator[str]:
    if megatron_of(spec) is not None and not is_installed():
        yield f"spec.{MISSING}"


_AWS_LOGINS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONFIG_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Variables that say where credentials of AWS come from."""


def missing_logins(
    spec: SFTJobSpec, environment: Mapping[str, str], uris: Sequence[str] | None = None
) -> Iterator[str]:
    """What is missing in place of Secrets, a sentence each; of those alone that reading ``uris`` asks for, if given.

    A Secret is out of reach without a cluster: the shell must hold what the pods would get from it.
    """

    def asked(scheme: str) -> bool:
        return uris is None or any(uri.startswith(scheme) for uri in uris)

    home = Path(environment.get("HOME") or "/")
    hub_token = any(environment.get(name) for name in HUB_LOGINS) or hub_token_file(environment).is_file()
    if spec.model.token_secret_ref and asked("hf://") and not hub_token:
        yield (
            f"spec.model.tokenSecretRef: there is no cluster to read Secret {spec.model.token_secret_ref.name} from: "
            "set HF_TOKEN in this shell, or log in with hf auth login"
        )
    elif spec.export.hub and uris is None and not spec.training.dummy_run and not hub_token:
        yield (
            f"spec.export.hub: nobody may write to {spec.export.hub.repository} without a token: set HF_TOKEN in this "
            "shell, or log in with hf auth login"
        )
    aws_files = any((home / ".aws" / name).is_file() for name in ("credentials", "config"))
    aws_login = aws_files or any(environment.get(name) for name in _AWS_LOGINS)
    if spec.checkpoint.s3.credentials_secret_ref and asked("s3://") and not aws_login:
        yield (
            "spec.checkpoint.s3.credentialsSecretRef: there is no cluster to read Secret "
            f"{spec.checkpoint.s3.credentials_secret_ref} from: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and "
            "AWS_SESSION_TOKEN, if there is one) in this shell, or AWS_PROFILE"
        )


def _missing_variables(spec: SFTJobSpec, environment: Mapping[str, str]) -> Iterator[str]:
    for variable in spec.compute.env:
        if variable.value is None and variable.name not in environment:
            yield (
                f"spec.compute.env {variable.name}: there is no cluster to read its value from: set {variable.name} "
                "in this shell"
            )


def _notes(asked: SFTJobSpec, processes: int) -> Iterator[str]:
    if asked.model.token_secret_ref:
        yield "hf:// is read with HF_TOKEN of this shell (or the token of hf auth login)."
    if asked.checkpoint.s3.credentials_secret_ref:
        yield "s3:// is reached with the AWS_* variables or profile of this shell."
    from_shell = [variable.name for variable in asked.compute.env if variable.value is None]
    if from_shell:
        yield f"Taken from this shell: {', '.join(from_shell)}."
    if asked.compute.pod_profile:
        yield (
            f"spec.compute.podProfile: {asked.compute.pod_profile} says nothing here: what it gives pods is the "
            "cluster's."
        )
    if asked.suspend:
        yield "spec.suspend is true: it says nothing here, the run starts."
    if asked.run_policy.active_deadline_seconds is not None:
        yield "spec.runPolicy.activeDeadlineSeconds says nothing here: the run takes as long as it takes."
    if processes != asked.compute.processes:
        yield (
            f"{counted(processes, 'process')} instead of the manifest's {asked.compute.processes}: the steps stay "
            "the same."
        )
