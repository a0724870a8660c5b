"""Manifests with a value that no manifest may have: by its rule (quantities, places, names), or by the schema."""

from tests.integration.manifests import ROWS, Bad, train

VALUES = [
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
            ("data/rows.jsonl.gz", "only an absolute path says the same everywhere: file:///absolute/path"),
            ("data/rows.CSV.ZST", "only an absolute path says the same everywhere: file:///absolute/path"),
            ("/models/a", "did you mean file:///models/a?"),
            ("file://tmp", "did you mean file:///tmp?"),
            ("file://tmp/model", "did you mean file:///tmp/model?"),
            ("gpt2", ""),
            ("hf://org/name@main/folder", ""),
            ("hf://org/name@refs/pr/3/folder", ""),
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
    *(
        Bad(
            f"claim with a name that none has: {claim}",
            "spec.checkpoint.uri",
            {"checkpoint": f"{{uri: 'pvc://{claim}/runs'}}"},
            "must name the claim in lower-case letters, digits, - and .: Kubernetes has no others",
        )
        for claim in ("my_claim", "Models", "a:b", "[a", "a-")
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
            "export.uri (export/ in checkpoint.uri when absent) must be neither model.uri, model.tokenizerUri or "
            "lora.adapterUri nor above or below them: the export would overwrite what the run starts from",
        )
        for title, model, more in (
            ("the same", "", {"export": "{uri: s3://b/base}"}),
            ("the same with a slash", "", {"export": "{uri: s3://b/base/}"}),
            ("above", "", {"export": "{uri: s3://b}"}),
            ("below", "", {"export": "{uri: s3://b/base/tuned}"}),
            ("the adapters", "", {"lora": "{adapterUri: s3://b/tuned/}", "export": "{uri: s3://b/tuned}"}),
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
    *(
        Bad(
            f"checkpoints among the data: {title}",
            "spec",
            {
                "data": "{train: [{uri: hf://org/rows}, {uri: pvc://c/rows/}], "
                "eval: [{uri: s3://b/held-out, name: a}]}",
                "checkpoint": f"{{uri: '{uri}'}}",
                "export": "{atEnd: false}",
            },
            "checkpoint.uri must be neither the uri of data.train or data.eval nor below one: all that lies in a "
            "folder of data is read, and the run's own records would be taken for rows",
        )
        for title, uri in (
            ("the same", "pvc://c/rows"),
            ("below", "pvc://c/rows/run"),
            ("below the evaluation set", "s3://b/held-out/run"),
        )
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
        "the hub holds no checkpoints, and of an export a copy: export.hub.repository",
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
        {"data": f"{{{ROWS}, eval: [{{name: a/b, uri: hf://org/rows}}]}}"},
        "must be letters, digits, - _ .",
    ),
    *(
        Bad(
            f"no repository: {repository}",
            "spec.export.hub.repository",
            {"export": f"{{hub: {{repository: '{repository}'}}}}"},
            "must be org/name, a repository for models on the hub",
            hint,
        )
        for repository, hint in (
            ("hf://org/mine", "did you mean org/mine?"),
            ("https://huggingface.co/org/mine", "did you mean org/mine?"),
            ("org/mine@v2", "the branch is export.hub.revision"),
            ("https://huggingface.co/org/mine/tree/main", "the branch is export.hub.revision"),
            ("mine", "the organisation, or user, is missing"),
            ("datasets/org/mine", ""),
        )
    ),
    *(
        Bad(
            f"no name on the hub: {repository}",
            "spec.export.hub.repository",
            {"export": f"{{hub: {{repository: {repository}}}}}"},
            "must have no -- and no .., and no -, . or .git at an end: the hub takes no such names",
        )
        for repository in ("org/my--model", "org/my..model", "org/mine.git", "org/mine-", "org-/mine")
    ),
    Bad(
        "branch with a space",
        "spec.export.hub.revision",
        {"export": "{hub: {repository: org/mine, revision: my branch}}"},
        "must be the name of a branch: letters, digits, -, _ and . between slashes",
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
    Bad("evaluation set without name", "spec.data.eval[0].name", {"data": f"{{{ROWS}, eval: [{{uri: hf://o/r}}]}}"}),
    Bad("field in lower case", "spec.data.maxlength", {"data": f"{{{ROWS}, maxlength: 512}}"}),
    Bad("field in snake case", "spec.data.max_length", {"data": f"{{{ROWS}, max_length: 512}}"}),
    Bad("field of nowhere", "spec.learningRate", {"learningRate": "1e-5"}),
    Bad("rest of a number", "spec.training.0", {"training": "{steps: 1,000}"}),
    Bad(
        "field of nowhere in a list, without a value",
        "spec.data.train[1].name",
        {"data": train("{uri: hf://o/r, name: }")},
    ),
    Bad("field in a list", "spec.data.train[0].name", {"data": "{train: [{uri: hf://org/rows, name: a}]}"}),
    Bad("field of metadata", "metadata.lables", metadata=", lables: {}"),
    Bad("twice the same key", "line 8: steps", {"training": "{steps: 1, steps: 2}"}),
    Bad("text for a number", "spec.data.maxLength", {"data": f"{{{ROWS}, maxLength: '512'}}"}),
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
    Bad("shape that is none", "spec.training.schedule.type", {"training": "{schedule: {type: exponential}}"}),
    Bad("packing off", "spec.data.packing", {"data": f"{{{ROWS}, packing: off}}"}),
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
