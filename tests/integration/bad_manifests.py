"""Manifests that must be refused: by the API server and by the CLI alike.

Every part of the spec is YAML text, because how numbers, words and duplicate keys are read is part of what is tested.
"""

from dataclasses import dataclass, field

MINIMAL_SPEC = {
    "model": "{uri: hf://Qwen/Qwen3-0.6B}",
    "data": "{train: [{uri: hf://allenai/tulu-3-sft-mixture}]}",
    "compute": "{}",
}


def manifest(spec: dict[str, str | None] | None = None, *, name: str = "job", metadata: str = "") -> str:
    """A manifest with the minimal spec, parts of it replaced, added, or (with None) left out."""
    parts = {**MINIMAL_SPEC, **(spec or {})}
    lines = [f"  {part}: {text}" for part, text in parts.items() if text is not None]
    header = ["apiVersion: sftjob.dev/v1alpha1", "kind: SFTJob", f"metadata: {{name: {name}{metadata}}}", "spec:"]
    return "\n".join([*header, *lines]) + "\n"


def train(*sources: str) -> str:
    """``spec.data`` text with these sources besides a first good one."""
    return ", ".join(["{train: [{uri: hf://org/rows}", *sources]) + "]}"


@dataclass(frozen=True)
class Bad:
    """One fault.

    ``at``: the path both name. ``sentence``: what both say, when the fault is against a rule; ``hint``: what both say
    besides, about a near miss.
    """

    title: str
    at: str
    spec: dict[str, str | None] = field(default_factory=dict)
    sentence: str = ""
    hint: str = ""
    name: str = "job"
    metadata: str = ""

    @property
    def text(self) -> str:
        return manifest(self.spec, name=self.name, metadata=self.metadata)


_ROWS = "train: [{uri: hf://org/rows}]"

RULES = [
    Bad(
        "split cut short",
        "spec.data.train[1].split",
        {"data": train('{uri: hf://org/rows, split: "train[:10%"}')},
        "must be a split or slices of one: write for example train, train[:500], train[10%:20%] or train[:50%]+test",
    ),
    Bad(
        "steps and epochs",
        "spec.training",
        {"training": "{steps: 10, epochs: 1}"},
        "give training.steps or training.epochs, not both",
    ),
    Bad(
        "both batch sizes",
        "spec.training",
        {"training": "{globalBatchSize: 8, globalBatchTokens: 65536}"},
        "give training.globalBatchSize or training.globalBatchTokens, not both",
    ),
    Bad(
        "warm-up twice",
        "spec.training.schedule",
        {"training": "{schedule: {warmupRatio: 0.1, warmupSteps: 10}}"},
        "give schedule.warmupRatio or schedule.warmupSteps, not both",
    ),
    Bad(
        "constant with warm-up",
        "spec.training.schedule",
        {"training": "{schedule: {type: constant, warmupSteps: 10}}"},
        "schedule type constant has no warm-up: use constantWithWarmup",
    ),
    Bad(
        "micro-batch below the longest example",
        "spec",
        {"training": "{maxTokensPerMicroBatch: 4095}"},
        "training.maxTokensPerMicroBatch must be at least data.maxLength when packing: the longest example must fit "
        "into a micro-batch",
    ),
    Bad(
        "token batch without packing",
        "spec",
        {"data": f"{{{_ROWS}, packing: none}}", "training": "{globalBatchTokens: 65536}"},
        "training.globalBatchTokens and training.maxTokensPerMicroBatch need data.packing: ffd; without packing give "
        "training.globalBatchSize and training.microBatchSize",
    ),
    Bad(
        "micro-batch size with packing",
        "spec",
        {"training": "{microBatchSize: 2}"},
        "training.microBatchSize needs data.packing: none; with packing give training.maxTokensPerMicroBatch",
    ),
    Bad(
        "batch not divisible by the processes",
        "spec",
        {"training": "{globalBatchSize: 9}", "compute": "{nodes: 2, gpusPerNode: 2}"},
        "training.globalBatchSize must be divisible by the number of processes (nodes x processes per node)",
    ),
    Bad(
        "batch not divisible on the CPU",
        "spec",
        {"training": "{globalBatchSize: 8}", "compute": "{gpusPerNode: 0, processesPerNode: 3}"},
        "training.globalBatchSize must be divisible by the number of processes (nodes x processes per node)",
    ),
    Bad(
        "share of a process not divisible by the micro-batch",
        "spec",
        {"data": f"{{{_ROWS}, packing: none}}", "training": "{globalBatchSize: 8, microBatchSize: 3}"},
        "training.globalBatchSize must be divisible by the number of processes times training.microBatchSize",
    ),
    Bad(
        "token batch below one micro-batch a process",
        "spec",
        {"training": "{globalBatchTokens: 32767}", "compute": "{gpusPerNode: 8}"},
        "training.globalBatchTokens must hold one full micro-batch (training.maxTokensPerMicroBatch, or "
        "data.maxLength) on every process",
    ),
    Bad(
        "shard degree that does not divide",
        "spec",
        {"strategy": "{fsdp: {shardDegree: 3}}", "compute": "{gpusPerNode: 8}"},
        "strategy.fsdp.shardDegree must divide the number of processes (compute.nodes x processes per node)",
    ),
    Bad(
        "best without evaluation",
        "spec",
        {"checkpoint": "{keep: {best: 1}}"},
        "checkpoint.keep.best needs data.eval: the best is the one with the lowest evaluation loss",
    ),
    Bad(
        "evaluation of nothing",
        "spec",
        {"training": "{evaluation: {everySteps: 10}}"},
        "training.evaluation needs data.eval: name the data to evaluate on",
    ),
    Bad(
        "evaluation of an empty list",
        "spec",
        {"data": f"{{{_ROWS}, eval: []}}", "training": "{evaluation: {beforeTraining: true}}"},
        "training.evaluation needs data.eval: name the data to evaluate on",
    ),
    Bad(
        "evaluation names twice",
        "spec.data",
        {"data": f"{{{_ROWS}, eval: [{{name: a, uri: hf://org/rows}}, {{name: a, uri: hf://org/other}}]}}"},
        "names of data.eval must differ: each names its own metric",
    ),
    Bad(
        "weights for some",
        "spec.data",
        {"data": train("{uri: hf://org/other, weight: 2}")},
        "give every data.train source a weight, or none of them",
    ),
    Bad(
        "weights in order",
        "spec.data",
        {"data": "{train: [{uri: hf://org/rows, weight: 2}], sampler: sequential}"},
        "weights need data.sampler: random",
    ),
    Bad(
        "processes other than GPUs",
        "spec.compute",
        {"compute": "{gpusPerNode: 8, processesPerNode: 4}"},
        "compute.processesPerNode must equal compute.gpusPerNode when there are GPUs: leave it out",
    ),
    Bad(
        "GPUs among the resources",
        "spec.compute",
        {"compute": "{resources: {limits: {nvidia.com/gpu: 1}}}"},
        "GPUs are asked for with compute.gpusPerNode, not with compute.resources",
    ),
    Bad(
        "half a device",
        "spec.compute.resources.requests",
        {"compute": "{resources: {requests: {rdma/hca: 500m}}}"},
        "resources with a domain are whole numbers, such as rdma/hca: 1",
    ),
    Bad(
        "resource that is none",
        "spec.compute.resources.requests",
        {"compute": "{resources: {requests: {mem: 1Gi}}}"},
        "resources are cpu, memory, ephemeral-storage, hugepages-SIZE, or have a domain such as rdma/hca",
    ),
    Bad(
        "requests above limits",
        "spec.compute.resources",
        {"compute": "{resources: {requests: {cpu: 4, memory: 2Gi}, limits: {cpu: 5, memory: 2000Mi}}}"},
        "compute.resources.requests must not exceed compute.resources.limits",
    ),
    Bad(
        "reserved environment variable",
        "spec.compute.env[0].name",
        {"compute": "{env: [{name: MASTER_ADDR, value: x}]}"},
        "this environment variable is set by the supervisor and cannot be given",
    ),
    Bad(
        "environment variable with a dash",
        "spec.compute.env[0].name",
        {"compute": "{env: [{name: NCCL-DEBUG, value: INFO}]}"},
        "must be letters, digits and _, not starting with a digit",
    ),
    Bad(
        "environment variable without a value",
        "spec.compute.env[0]",
        {"compute": "{env: [{name: NCCL_DEBUG}]}"},
        "give value or valueFrom",
    ),
    Bad(
        "environment variable from two places",
        "spec.compute.env[0].valueFrom",
        {
            "compute": "{env: [{name: KEY, valueFrom: {secretKeyRef: {name: a, key: b}, "
            "configMapKeyRef: {name: a, key: b}}}]}"
        },
        "give valueFrom.secretKeyRef or valueFrom.configMapKeyRef",
    ),
    Bad(
        "toleration of any key, Equal",
        "spec.compute.tolerations[0]",
        {"compute": "{tolerations: [{value: x}]}"},
        "a toleration without key needs operator: Exists",
    ),
    Bad(
        "toleration that exists with a value",
        "spec.compute.tolerations[0]",
        {"compute": "{tolerations: [{key: a, operator: Exists, value: x}]}"},
        "a toleration with operator: Exists has no value",
    ),
    Bad(
        "toleration for a while, of no effect",
        "spec.compute.tolerations[0]",
        {"compute": "{tolerations: [{key: a, operator: Exists, tolerationSeconds: 5}]}"},
        "tolerationSeconds needs effect: NoExecute",
    ),
    Bad(
        "label with a space",
        "spec.compute.labels",
        {"compute": '{labels: {"my team": research}}'},
        "keys must be [domain/]name: letters, digits, -, _ and ., at most 63 after the domain",
    ),
    Bad(
        "label value with a space",
        "spec.compute.nodeSelector.pool",
        {"compute": '{nodeSelector: {pool: "big ones"}}'},
        "must be a label value: letters, digits, -, _ and .",
    ),
    Bad(
        "environment variable twice",
        "spec.compute",
        {"compute": "{env: [{name: A, value: a}, {name: B, value: b}, {name: A, value: a}]}"},
        "names of compute.env must differ: give each variable once",
    ),
    *(
        Bad(
            f"environment of the image: {name}",
            "spec.compute.env[0].name",
            {"compute": f"{{env: [{{name: {name}, value: x}}]}}"},
            "this environment variable belongs to the image, which does not start without it: set it in an image of "
            "your own",
        )
        for name in ("PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONINSPECT")
    ),
    *(
        Bad(
            f"environment of the group: {name}",
            "spec.compute.env[0].name",
            {"compute": f"{{env: [{{name: {name}, value: '1'}}]}}"},
            "this environment variable is set by the supervisor and cannot be given",
        )
        for name in ("JOB_COMPLETION_INDEX", "TORCHELASTIC_USE_AGENT_STORE", "RANK", "SFT_GENERATION")
    ),
    *(
        Bad(
            f"memory of {amount}",
            "spec.compute.resources.limits",
            {"compute": f"{{resources: {{limits: {{memory: {amount}}}}}}}"},
            "memory must be at least 64Mi: 64 alone is 64 bytes and 500m half a byte; write 64Gi or 500Mi",
        )
        for amount in ("1m", "64", "0", "'67108863'")
    ),
    Bad(
        "a thousandth of a processor",
        "spec.compute.resources.requests",
        {"compute": "{resources: {requests: {cpu: 1m}}}"},
        "cpu must be at least 10m, a hundredth of a processor",
    ),
    *(
        Bad(
            f"64 bytes of {name}",
            "spec.compute.resources.requests",
            {"compute": f"{{resources: {{requests: {{{name}: 64}}}}}}"},
            "ephemeral-storage and hugepages must be at least 1Mi: 64 alone is 64 bytes; write 64Gi",
        )
        for name in ("ephemeral-storage", "hugepages-2Mi")
    ),
    *(
        Bad(
            f"64 bytes of {name}",
            f"spec.compute.{name}",
            {"compute": f"{{{name}: 64}}"},
            "must be at least 1Mi: 64 alone is 64 bytes; write 64Gi",
        )
        for name in ("cacheSize", "sharedMemorySize")
    ),
    *(
        Bad(
            f"quantity {amount}",
            "spec.compute.cacheSize",
            {"compute": f"{{cacheSize: {amount}}}"},
            "must be a quantity such as 2, 500m or 64Gi",
            hint,
        )
        for amount, hint in (
            ("50GB", "did you mean 50Gi or 50G?"),
            ("20 Gi", "did you mean 20Gi?"),
            ("1.5TiB", "did you mean 1.5Ti?"),
            ("16g", "did you mean 16G?"),
            ("16 gb", "did you mean 16Gi?"),
            ("512mb", "did you mean 512Mi?"),
            ("much", ""),
            ("'-1Gi'", ""),
        )
    ),
    Bad(
        "memory in gigabytes",
        "spec.compute.resources.requests.memory",
        {"compute": "{resources: {requests: {memory: 16GB}}}"},
        "must be a quantity such as 2, 500m or 64Gi",
        "did you mean 16Gi or 16G?",
    ),
    *(
        Bad(
            f"model of no scheme: {uri}",
            "spec.model.uri",
            {"model": f"{{uri: '{uri}'}}"},
            "must be hf://org/name[@revision], s3://bucket/prefix, pvc://claim/path or file:///absolute/path",
            hint,
        )
        for uri, hint in (
            ("Qwen/Qwen3-0.6B", "did you mean hf://Qwen/Qwen3-0.6B?"),
            ("Qwen/Qwen3-0.6B@main", "did you mean hf://Qwen/Qwen3-0.6B@main?"),
            ("https://huggingface.co/Qwen/Qwen3-0.6B", "did you mean hf://Qwen/Qwen3-0.6B?"),
            ("https://huggingface.co/datasets/Qwen/a/tree/v1", "did you mean hf://Qwen/a@v1?"),
            ("hf://datasets/Qwen/a", "did you mean hf://Qwen/a?"),
            ("hf://Qwen/a/tree/v1", "did you mean hf://Qwen/a@v1?"),
            ("file://~/model", "only an absolute path says the same everywhere: file:///absolute/path"),
            ("./model", "only an absolute path says the same everywhere: file:///absolute/path"),
            ("..", "only an absolute path says the same everywhere: file:///absolute/path"),
            ("~/model", "only an absolute path says the same everywhere: file:///absolute/path"),
            ("data/rows.jsonl", "only an absolute path says the same everywhere: file:///absolute/path"),
            ("/models/a", "did you mean file:///models/a?"),
            ("file://tmp", "did you mean file:///tmp?"),
            ("file://tmp/model", "did you mean file:///tmp/model?"),
            ("gpt2", ""),
        )
    ),
    Bad(
        "checkpoints in the current folder",
        "spec.checkpoint.uri",
        {"checkpoint": "{uri: ./out}"},
        "must be s3://bucket/prefix, pvc://claim/path or file:///absolute/path",
        "only an absolute path says the same everywhere: file:///absolute/path",
    ),
    *(
        Bad(
            f"another spelling: {uri}",
            "spec.checkpoint.uri",
            {"checkpoint": f"{{uri: '{uri}'}}"},
            "must have no empty part and no part . or .. between its slashes: one place has one name",
        )
        for uri in (
            "s3://bucket/../..",
            "s3://bucket//x",
            "s3://bucket/x//",
            "s3://bucket/./x",
            "s3://..",
            "file:///a/./b",
            "file:///a/..",
            "file:////a",
            "pvc://claim/../other",
            "pvc://claim//a",
        )
    ),
    Bad(
        "model of an organisation that is none",
        "spec.model.uri",
        {"model": "{uri: hf://../name}"},
        "must have no empty part and no part . or .. between its slashes: one place has one name",
    ),
    Bad(
        "folder of all claims by its path in the pod",
        "spec.model.uri",
        {"model": "{uri: file:///mnt/pvc}"},
        "must name the claim: pvc://claim/path is what pods find in /mnt/pvc/claim/path",
    ),
    Bad(
        "claim by the path in the pod",
        "spec.model.uri",
        {"model": "{uri: file:///mnt/pvc/claim/model}"},
        "must name the claim: pvc://claim/path is what pods find in /mnt/pvc/claim/path",
    ),
    Bad(
        "place of a template instead of the template",
        "spec.model.chatTemplate",
        {"model": "{uri: hf://org/name, chatTemplate: ./t.jinja}"},
        "must be the text of a Jinja template, not its place: put the text below chatTemplate: |",
    ),
    *(
        Bad(
            f"export over the model: {title}",
            "spec",
            {"model": f"{{uri: 's3://b/base'{model}}}", **more},
            "export.uri (export/ in checkpoint.uri when absent) must be neither model.uri or model.tokenizerUri nor "
            "above or below them: the export would overwrite what the run starts from",
        )
        for title, model, more in (
            ("the same", "", {"export": "{uri: s3://b/base}"}),
            ("the same with a slash", "", {"export": "{uri: s3://b/base/}"}),
            ("above", "", {"export": "{uri: s3://b}"}),
            ("below", "", {"export": "{uri: s3://b/base/tuned}"}),
            ("the tokenizer", ", tokenizerUri: 'pvc://c/t/'", {"export": "{uri: pvc://c/t}"}),
            ("by default", ", tokenizerUri: 's3://b/runs/export'", {"checkpoint": "{uri: s3://b/runs}"}),
            ("by default, slash", ", tokenizerUri: 's3://b/runs/export'", {"checkpoint": "{uri: s3://b/runs/}"}),
        )
    ),
    *(
        Bad(
            f"export among the data: {title}",
            "spec",
            {
                "data": "{train: [{uri: hf://org/rows}, {uri: s3://b/rows/a.jsonl}], "
                "eval: [{uri: pvc://c/held-out, name: a}]}",
                **more,
            },
            "export.uri (export/ in checkpoint.uri when absent) must be neither the uri of data.train or data.eval nor "
            "above or below one: the export would be written among the data",
        )
        for title, more in (
            ("above", {"export": "{uri: s3://b/rows}"}),
            ("the evaluation set", {"export": "{uri: pvc://c/held-out/}"}),
            ("below", {"export": "{uri: pvc://c/held-out/export}"}),
            ("by default", {"checkpoint": "{uri: pvc://c/held-out}"}),
        )
    ),
    *(
        Bad(
            f"export among the checkpoints: {uri}",
            "spec",
            {"checkpoint": "{uri: s3://b/runs/one}", "export": f"{{uri: '{uri}'}}"},
            "export.uri must be neither checkpoint.uri nor above or below it, but for its folder export: the export "
            "would be written among the checkpoints",
        )
        for uri in ("s3://b/runs/one", "s3://b/runs/one/", "s3://b/runs", "s3://b/runs/one/model", "s3://b/")
    ),
    Bad(
        "model with a line break at the end",
        "spec.model.uri",
        {"model": '{uri: "file:///models/a\\n"}'},
        "must be hf://org/name[@revision], s3://bucket/prefix, pvc://claim/path or file:///absolute/path",
    ),
    Bad(
        "data of an unknown scheme",
        "spec.data.train[1].uri",
        {"data": train("{uri: gs://bucket/rows}")},
        "must be hf://org/name[@revision], s3://bucket/prefix, pvc://claim/path or file:///absolute/path",
    ),
    Bad(
        "checkpoints to the hub",
        "spec.checkpoint.uri",
        {"checkpoint": "{uri: hf://org/name}"},
        "must be s3://bucket/prefix, pvc://claim/path or file:///absolute/path",
    ),
    Bad(
        "endpoint without a scheme",
        "spec.checkpoint.s3.endpoint",
        {"checkpoint": "{s3: {endpoint: minio:9000}}"},
        "must be http://host[:port] or https://…",
    ),
    Bad(
        "evaluation name with a slash",
        "spec.data.eval[0].name",
        {"data": f"{{{_ROWS}, eval: [{{name: a/b, uri: hf://org/rows}}]}}"},
        "must be letters, digits, - _ .",
    ),
    Bad(
        "secret in capitals",
        "spec.model.tokenSecretRef.name",
        {"model": "{uri: hf://org/name, tokenSecretRef: {name: HF_TOKEN}}"},
        "must be a lower-case Kubernetes object name",
    ),
    Bad(
        "name that starts with a digit",
        "",
        name="1st",
        sentence="metadata.name must be at most 50 lower-case letters, digits and -, starting with a letter: it names "
        "a Service and the pods",
    ),
    Bad(
        "name that is too long",
        "",
        name="a" * 51,
        sentence="metadata.name must be at most 50 lower-case letters, digits and -, starting with a letter: it names "
        "a Service and the pods",
    ),
]

SCHEMA = [
    Bad("no model", "spec.model", {"model": None}),
    Bad("no data", "spec.data", {"data": None}),
    Bad("no compute", "spec.compute", {"compute": None}),
    Bad("model that is null", "spec.model", {"model": "null"}),
    Bad("source without uri", "spec.data.train[0].uri", {"data": "{train: [{split: train}]}"}),
    Bad("nothing to train on", "spec.data.train", {"data": "{train: []}"}),
    Bad("null in a list", "spec.data.train[1]", {"data": train("null")}),
    Bad("evaluation set without name", "spec.data.eval[0].name", {"data": f"{{{_ROWS}, eval: [{{uri: hf://o/r}}]}}"}),
    Bad("field in lower case", "spec.data.maxlength", {"data": f"{{{_ROWS}, maxlength: 512}}"}),
    Bad("field in snake case", "spec.data.max_length", {"data": f"{{{_ROWS}, max_length: 512}}"}),
    Bad("field of nowhere", "spec.learningRate", {"learningRate": "1e-5"}),
    Bad("field in a list", "spec.data.train[0].name", {"data": "{train: [{uri: hf://org/rows, name: a}]}"}),
    Bad("field of metadata", "metadata.lables", metadata=", lables: {}"),
    Bad("twice the same key", "line 8: steps", {"training": "{steps: 1, steps: 2}"}),
    Bad("text for a number", "spec.data.maxLength", {"data": f"{{{_ROWS}, maxLength: '512'}}"}),
    Bad("fraction for a whole number", "spec.training.steps", {"training": "{steps: 1.5}"}),
    Bad("yes for a text", "spec.compute.image", {"compute": "{image: yes}"}),
    Bad("text for a truth", "spec.suspend", {"suspend": '"yes"'}),
    Bad("number for a truth", "spec.export.atEnd", {"export": "{atEnd: 1}"}),
    Bad("truth for a number", "spec.training.steps", {"training": "{steps: on}"}),
    Bad("number for a text", "spec.checkpoint.s3.region", {"checkpoint": "{s3: {region: 1}}"}),
    Bad("quoted exponent", "spec.training.optimizer.learningRate", {"training": '{optimizer: {learningRate: "1e-5"}}'}),
    Bad("text for a list", "spec.data.train", {"data": "{train: hf://org/rows}"}),
    Bad("list for a map", "spec.model", {"model": "[hf://org/name]"}),
    Bad("text for a map", "spec.strategy", {"strategy": "fsdp"}),
    Bad("number as an environment value", "spec.compute.env[0].value", {"compute": "{env: [{name: A, value: 1}]}"}),
    Bad("label that is a truth", "spec.compute.labels.gpu", {"compute": "{labels: {gpu: true}}"}),
    Bad(
        "learning rate of zero", "spec.training.optimizer.learningRate", {"training": "{optimizer: {learningRate: 0}}"}
    ),
    Bad(
        "learning rate above one",
        "spec.training.optimizer.learningRate",
        {"training": "{optimizer: {learningRate: 2e0}}"},
    ),
    Bad("beta of one", "spec.training.optimizer.betas[1]", {"training": "{optimizer: {betas: [0.9, 1]}}"}),
    Bad("one beta", "spec.training.optimizer.betas", {"training": "{optimizer: {betas: [0.9]}}"}),
    Bad("three betas", "spec.training.optimizer.betas", {"training": "{optimizer: {betas: [0.9, 0.9, 0.9]}}"}),
    Bad("no node", "spec.compute.nodes", {"compute": "{nodes: 0}"}),
    Bad("negative GPUs", "spec.compute.gpusPerNode", {"compute": "{gpusPerNode: -1}"}),
    Bad("seed of 33 bits", "spec.training.seed", {"training": "{seed: 4294967296}"}),
    Bad("steps in hexadecimal, too many", "spec.training.steps", {"training": "{steps: 0x3b9aca01}"}),
    Bad("shape that is none", "spec.training.schedule.type", {"training": "{schedule: {type: polynomial}}"}),
    Bad("packing off", "spec.data.packing", {"data": f"{{{_ROWS}, packing: off}}"}),
    Bad("empty image", "spec.compute.image", {"compute": '{image: ""}'}),
    Bad("long image", "spec.compute.image", {"compute": f"{{image: {'a' * 513}}}"}),
    Bad("too many sources", "spec.data.train", {"data": train(*["{uri: hf://org/rows}"] * 64)}),
    Bad(
        "too many labels",
        "spec.compute.labels",
        {"compute": f"{{labels: {{{', '.join(f'k{n}: v' for n in range(33))}}}}}"},
    ),
    Bad("quantity below zero", "spec.compute.cacheSize", {"compute": "{cacheSize: -1}"}),
    Bad(
        "quantity with a fraction, no text",
        "spec.compute.resources.requests.cpu",
        {"compute": "{resources: {requests: {cpu: 1.5}}}"},
    ),
    Bad(
        "grace period of a second",
        "spec.runPolicy.terminationGracePeriodSeconds",
        {"runPolicy": "{terminationGracePeriodSeconds: 1}"},
    ),
    Bad(
        "deadline of a year and more",
        "spec.runPolicy.activeDeadlineSeconds",
        {"runPolicy": "{activeDeadlineSeconds: 31536001}"},
    ),
]
