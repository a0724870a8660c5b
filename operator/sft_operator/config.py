"""Settings of the operator: one YAML or JSON file (the chart mounts it from a ConfigMap); flags override a few.

No secret is ever here: the operator's own store credentials come from its environment.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from sft_api.gpus import labelled_memory
from sft_api.trust import checked_bundle
from sft_api.v1alpha1 import ResourcesSpec, S3Spec
from sft_api.v1alpha1.base import AnnotationMap, LabelMap, Name
from sft_api.v1alpha1.compute import EnvVar
from sft_api.v1alpha1.quantities import Quantity, quantity_value

from .pod_template import OURS_IN_POD, checked_labels, checked_spec, merged, trainer_of, trainer_resources

Seconds = Annotated[float, Field(gt=0)]


class SettingsModel(BaseModel):
    """camelCase in the file; unknown keys are refused, since a misspelt one would silently do nothing."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
    )


class StoreSettings(SettingsModel):
    """The platform's default store, for jobs that name no ``checkpoint.uri``."""

    uri: Annotated[str, Field(pattern=r"^s3://[^/]+(/.*)?$")]
    """Each job gets ``<uri>/<namespace>/<name>-<digest>`` below it."""
    s3: S3Spec = S3Spec()
    """How it is reached. ``credentialsSecretRef`` names a Secret of the *job's* namespace."""
    verify: bool = False
    """Whether the operator itself reads manifests (with the credentials in its own environment), of each job in its
    namespace's folder."""
    remove: bool = False
    """Whether it removes the places of jobs with ``deletionPolicy: Delete`` there. Its credentials then need the
    right to write and delete."""

    @model_validator(mode="after")
    def _removes_what_it_reads(self) -> Self:
        if self.remove and not self.verify:
            raise ValueError("store.remove needs store.verify: the operator removes only what it has seen to be ours")
        return self


class DefaultResources(SettingsModel):
    """What pods get of resources that their job names neither in its requests nor in its limits."""

    per_gpu: ResourcesSpec = ResourcesSpec()
    per_cpu_process: ResourcesSpec = ResourcesSpec()
    """For each process of pods without GPUs."""


def _checked_environment(variables: dict[str, str]) -> dict[str, str]:
    """``variables``, if a job could give them too; raises ``ValueError`` that names the one it could not."""
    for name, value in variables.items():
        try:
            EnvVar(name=name, value=value)
        except ValidationError as error:
            raise ValueError(f"{name}: {error.errors()[0]['msg']}") from error
    return variables


class TemplateMetadata(SettingsModel):
    """Labels and annotations of pods; those of a job win."""

    labels: Annotated[LabelMap, AfterValidator(checked_labels)] = {}
    annotations: Annotated[AnnotationMap, AfterValidator(checked_labels)] = {}


class PodTemplate(SettingsModel):
    """A part of a pod template, as Kubernetes has it: ``pod_template`` says what of it is refused, and why."""

    metadata: TemplateMetadata = TemplateMetadata()
    spec: Annotated[
        dict[str, JsonValue],
        AfterValidator(checked_spec),
        Field(json_schema_extra={"properties": dict.fromkeys(sorted(OURS_IN_POD), False)}),
    ] = {}


class PodDefaults(SettingsModel):
    """What training pods have where the spec of a job says nothing else."""

    image: str | None = None
    megatron_image: str | None = None
    """Of jobs with ``strategy.megatron``: the trainer's image with Megatron-Core."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: list[str] = []
    env: Annotated[dict[str, str], AfterValidator(_checked_environment)] = {}
    """Environment variables of all training pods: the way out of the cluster (HTTPS_PROXY), a mirror (HF_ENDPOINT)."""
    gpu_memory: Quantity | None = None
    """Of each GPU of this cluster, for the plans of jobs that do not say on which kind they run."""
    resources: DefaultResources = DefaultResources(
        # Little enough for the smallest nodes with GPUs: 4 CPUs and 16 GiB for one.
        per_gpu=ResourcesSpec(requests={"cpu": 2, "memory": "8Gi"}),
        per_cpu_process=ResourcesSpec(requests={"cpu": 1, "memory": "2Gi"}),
    )
    template: PodTemplate = PodTemplate()
    """What pods have besides: volumes, containers beside the trainer, whatever places them."""

    @property
    def pod_spec(self) -> Mapping[str, Any]:
        """That of the template."""
        return self.template.spec


class PodProfile(PodDefaults):
    """What pods of jobs that name it (``compute.podProfile``) have instead: what it says goes before the default of the
    same name, in maps and templates item by item."""

    namespaces: Annotated[list[Name], Field(min_length=1)] | None = None
    """Whose jobs may name it; those of all when absent."""


class PodSettings(PodDefaults):
    """Defaults of training pods; the spec of a job wins."""

    command: list[str] = ["python", "-m", "sft_trainer.launch"]
    """Entry of the trainer image: the supervisor."""
    profiles: dict[Name, PodProfile] = {}

    @model_validator(mode="after")
    def _each_profile_fits(self) -> Self:
        """Also together with the defaults: a request of one may exceed a limit of the other."""
        for name in self.profiles:
            try:
                self.with_profile(name)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in (name, *first["loc"]))
                raise ValueError(f"profiles.{where}: {first['msg']}") from error
        return self

    def with_profile(self, name: str) -> Self:
        """The settings of pods with the profile ``name``, which there is."""
        profile = self.profiles[name]
        beneath = self.model_dump(exclude={"profiles"})
        if labelled_memory(profile.pod_spec.get("nodeSelector", {})):
            beneath["gpuMemory"] = None  # that of other nodes
        return self.model_validate(merged(beneath, profile.model_dump(exclude={"namespaces"}, exclude_unset=True)))

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of a GPU: ``gpu_memory``, or by the labels of nodes that the template asks for."""
        value = quantity_value(self.gpu_memory) if self.gpu_memory else None
        return int(value) if value else labelled_memory(self.pod_spec.get("nodeSelector", {}))

    @property
    def trainer(self) -> Mapping[str, Any]:
        """What the template says of the trainer's own container."""
        return trainer_of(self.pod_spec)

    @property
    def pod_resources(self) -> ResourcesSpec:
        """What the template says of the trainer's resources, for each pod."""
        return trainer_resources(self.trainer)


class NetworkPolicySettings(SettingsModel):
    """Who may reach training pods besides themselves. Labels select pods; namespaces go by name."""

    enabled: bool = True
    operator_namespace: str = "sft-system"
    operator_labels: dict[str, str] = {"app.kubernetes.io/name": "sft-operator"}
    metrics_namespaces: list[str] = []
    """Namespaces whose pods may scrape the trainers' metrics."""


class LeaderElectionSettings(SettingsModel):
    """Two replicas, one of which works: a Lease says which."""

    enabled: bool = False
    namespace: str = "sft-system"
    name: str = "sft-operator"
    lease_seconds: Seconds = 15
    renew_seconds: Seconds = 4

    @model_validator(mode="after")
    def _renewed_in_time(self) -> Self:
        """It is given up after two thirds of its time, and an answer takes some of that."""
        if 2 * self.renew_seconds > self.lease_seconds:
            raise ValueError(
                f"leaderElection.renewSeconds: {self.renew_seconds} is too long for leaseSeconds: "
                f"{self.lease_seconds}: set half of it at most"
            )
        return self


class Settings(SettingsModel):
    """Everything that can be set."""

    namespace: str | None = None
    """Serve only this namespace; all when absent."""
    store: StoreSettings | None = None
    ca_bundle: Annotated[str, AfterValidator(checked_bundle)] = ""
    """Certificates of authorities, in PEM, that the operator and training pods trust beside those of their images."""
    pods: PodSettings = PodSettings()
    network_policy: NetworkPolicySettings = NetworkPolicySettings()
    gang_scheduling: bool = True
    """Whether the pods of a job get their places together, or none of them, where the scheduler of Kubernetes knows
    groups (PodGroup, ``scheduling.k8s.io/v1beta1``); elsewhere it changes nothing."""
    leader_election: LeaderElectionSettings = LeaderElectionSettings()
    concurrency: Annotated[int, Field(ge=1, le=1000)] = 16
    """Jobs reconciled at the same time."""
    poll_concurrency: Annotated[int, Field(ge=1, le=1000)] = 64
    """Progress reports read at the same time."""
    polls_per_second: Annotated[float, Field(gt=0)] = 40
    """All reads together; with many jobs each is read more rarely, at least every 25 seconds."""
    poll_seconds: Seconds = 15.5
    """Between two reads of the progress of a training job: two of them, and an answer, within ``status_seconds``."""
    poll_seconds_starting: Seconds = 4
    """The same while a job starts or recovers, when people look at it."""
    status_seconds: Seconds = 32
    """No figure that is shown gets older than this while a job trains: a read that would be the last one in time is
    written. Transitions are written at once."""
    status_seconds_starting: Seconds = 30
    """The same for what is only said in other words while a job starts or recovers."""
    resync_seconds: Seconds = 120
    """Between two complete listings, which repair whatever a watch has lost."""
    stuck_pod_seconds: Seconds = 30
    """After the end of its grace period a pod that has not ended is taken for lost with its node."""
    silent_supervisor_seconds: Seconds = 30
    """So long after the kubelet's word that a supervisor does not answer, which comes after 15 s, it is replaced."""
    eviction_seconds: Seconds = 60
    """For so long an Eviction that is refused is tried again; then the pod is deleted as one that was disrupted."""
    progress_url: str = "http://{address}:{port}/v1/progress"
    """Where the supervisor of index 0 answers; ``{address}`` is the pod's IP, ``{namespace}``, ``{name}`` the job."""
    http_port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """/metrics, /healthz, /readyz of the operator itself; 0 takes any free port."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


def load_settings(path: Path | None, **flags: JsonValue) -> Settings:
    """The settings in the file ``path``, or the defaults for None, and ``flags`` by their names there, which go before.

    Raises ``pydantic.ValidationError`` naming the wrong key, ``OSError`` and ``yaml.YAMLError`` when the file cannot be
    read.
    """
    document = yaml.safe_load(path.read_bytes()) or {} if path else {}
    if isinstance(document, dict):
        # A file may also have our own spelling of a name, and a setting that has two is refused.
        document = {name: value for name, value in document.items() if to_camel(str(name)) not in flags} | flags
    return Settings.model_validate(document)
