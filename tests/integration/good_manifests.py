"""Manifests that must be accepted, by the API server and by the CLI, with the same defaults."""

from tests.integration.manifests import manifest

SHORTEST = manifest()

NULLS = manifest(
    {
        "data": "{train: [{uri: hf://org/rows, split: null, format: ~}], eval: null, packing: }",
        "training": "null",
        "strategy": "",
        "compute": "{labels: null, nodeSelector: {pool: null}, env: [{name: A, value: b, valueFrom: null}]}",
        "checkpoint": "{s3: null, everySteps: null}",
    }
)

NUMBERS = manifest(
    {
        "data": "{train: [{uri: hf://org/rows, weight: 1.0}, {uri: hf://org/other, weight: 5e-1}], maxLength: 0x1000}",
        "training": "{steps: 1e3, globalBatchTokens: 1_048_576, seed: 052, optimizer: {learningRate: 1e-5, "
        "eps: 1E-08, weightDecay: 0, betas: [.9, 0.95]}, schedule: {warmupRatio: 1}}",
        "compute": "{gpusPerNode: 8.0, cacheSize: 107374182400, resources: {requests: {cpu: 4, memory: 64Gi}}}",
        "suspend": "no",
        "export": "{atEnd: y}",
    }
)

ALIASES = """\
apiVersion: sftjob.dev/v1alpha1
kind: SFTJob
metadata: {name: job, labels: {kueue.x-k8s.io/queue-name: team-a, "1": "2"}, annotations: {example.com/note: "a b"}}
spec:
  model: {uri: "hf://org/name@main"}
  data:
    train:
    - &rows {uri: s3://bucket/rows, format: messages}
    eval:
    - {<<: *rows, name: held-out, split: "test[:10%]"}
  compute:
    resources:
      requests: &resources {cpu: 500m, rdma/hca: 1, hugepages-2Mi: 1Gi}
      limits: *resources
"""

ON_THE_CPU = manifest(
    {
        "model": "{uri: file:///models/tiny}",
        "data": "{train: [{uri: pvc://claim/rows.jsonl}], packing: none}",
        "training": "{epochs: 3, globalBatchSize: 12, microBatchSize: 2}",
        "compute": "{nodes: 3, gpusPerNode: 0, processesPerNode: 2}",
    },
    name="a" * 50,
)

# These two together give every field of the spec (a test checks that).
EVERY_FIELD_PACKED = """\
apiVersion: sftjob.dev/v1alpha1
kind: SFTJob
metadata: {name: every-field}
spec:
  model:
    uri: hf://org/name@0123abc
    tokenizerUri: s3://bucket/tokenizer
    chatTemplate: "{{ messages }}"
    addedTokens: [<ticket>, "two words", "#"]
    addedSpecialTokens: [<|turn|>]
    configOverrides:
      rope_parameters: {rope_type: yarn, factor: 4, original_max_position_embeddings: 32768, rope_theta: 1000000,
                        attention_factor: 1.5, beta_fast: 32, beta_slow: 1.5, truncate: false}
      max_position_embeddings: 131072
      sliding_window: 8192
      attention_dropout: 0
      attention_probs_dropout_prob: 0
      hidden_dropout: 0.1
      hidden_dropout_prob: 0.1
      resid_pdrop: 0
      residual_dropout: 0.1
      embd_pdrop: 0.1
      embedding_dropout: 0.1
    parameters: 0.6B
    tokenSecretRef: {name: hub, key: HF_TOKEN}
  lora:
    rank: 16
    alpha: 32.5
    dropout: 0.05
    targetModules: [q_proj, self_attn.v_proj, model.layers.0.mlp.down_proj]
    excludeModules: [layers.3.self_attn.q_proj]
    initMethod: gaussian
    trainableTokens: [<|im_end|>, " word"]
    basePrecision: nf4
  data:
    train:
    - {uri: hf://org/rows, split: "train[:50%]", subset: en, format: alpaca, messagesKey: chat, toolsKey: functions,
       systemKey: prompt, columns: {instruction: question, output: answer}, weight: 2}
    eval:
    - {name: held-out, uri: hf://org/rows, split: test, subset: en, format: pretokenized, messagesKey: chat,
       toolsKey: functions, systemKey: prompt, columns: {input_ids: tokens, labels: targets}}
    trainOn: allAssistantMessages
    maxLength: 8192
    overlong: split
    keepTokenized: false
    packing: ffd
    sampler: random
    workers: 4
  training:
    steps: 1000
    globalBatchTokens: 262144
    maxTokensPerMicroBatch: 16384
    optimizer: {learningRate: 2e-5, betas: [0.9, 0.95], eps: 1e-6, weightDecay: 0.1, maxGradNorm: 0.5,
      stateDtype: bf16}
    schedule: {type: warmupStableDecay, warmupRatio: 0.1, minRatio: 0.1, decayRatio: 0.2}
    loss: crossEntropy
    labelSmoothing: 0.1
    neftuneNoiseAlpha: 5
    routerAuxLossCoefficient: 0.001
    precision: bf16
    parameterDtype: fp32
    activationCheckpointing: full
    compile: true
    trainableModules: [lm_head, model.layers.27.input_layernorm]
    seed: 7
    evaluation: {everySteps: 100, beforeTraining: true, earlyStopping: {patience: 2, minDelta: 1e-3}}
    dummyRun: {steps: 10}
    callbacks: [{class: "my_team.watch:StopAtLoss", arguments: {loss: "1.2", patience_: "3"}}]
  strategy: {fsdp: {shardDegree: 8, reshardAfterForward: false, reduceDtype: bf16, cpuOffload: true,
    reduceGradients: everyMicroBatch, sequenceParallelDegree: 2}}
  compute:
    nodes: 2
    gpusPerNode: 8
    processesPerNode: 8
    launcher: ray
    image: registry.example.com/trainer:1
    imagePullPolicy: IfNotPresent
    imagePullSecrets: [registry]
    podProfile: h100-infiniband
    serviceAccountName: trainer
    gpuResourceName: nvidia.com/gpu
    gpuMemory: 80Gi
    memoryCheck: Warn
    resources: {requests: {cpu: "8", memory: 64Gi}, limits: {cpu: 16, memory: 64Gi}}
    nodeSelector: {node.kubernetes.io/instance-type: p5}
    tolerations:
    - {key: nvidia.com/gpu, operator: Equal, value: present, effect: NoExecute, tolerationSeconds: 60}
    priorityClassName: high
    runtimeClassName: nvidia
    env:
    - {name: NCCL_DEBUG, value: INFO}
    - {name: KEY, valueFrom: {secretKeyRef: {name: keys, key: a}}}
    - {name: MODE, valueFrom: {configMapKeyRef: {name: modes, key: b}}}
    sharedMemorySize: 16Gi
    cacheSize: 200Gi
    labels: {team: research}
    annotations: {example.com/note: nightly run}
  checkpoint:
    uri: s3://bucket/runs/every-field
    s3: {endpoint: "https://minio.example.com:9000", region: eu, forcePathStyle: true, checksum: whenSupported,
         credentialsSecretRef: s3-keys}
    everySteps: 200
    everySeconds: 300
    keep: {last: 3, best: 1, everySteps: 1000}
    async: false
    resume: {policy: never, from: {uri: pvc://models/other, step: 10, what: everything}}
  monitoring: {profile: {startStep: 100, steps: 5}, memorySnapshot: {startStep: 2, steps: 5}}
  export: {atEnd: true, checkpoint: best, everySteps: 1000, uri: pvc://models/every-field, mergeAdapter: true,
    hub: {repository: org/every-field, revision: runs/1, private: true}}
  suspend: true
  deletionPolicy: Delete
  runPolicy:
    maxRestarts: 3
    activeDeadlineSeconds: 86400
    ttlSecondsAfterFinished: 0
    progressDeadlineSeconds: 600
    storageDeadlineSeconds: 600
    startDeadlineSeconds: 60
    terminationGracePeriodSeconds: 60
"""

EVERY_OTHER_FIELD = manifest(
    {
        "model": "{uri: hf://org/name, configOverrides: {rope_parameters: {rope_type: llama3, factor: 8.0, "
        "original_max_position_embeddings: 8192, low_freq_factor: 1, high_freq_factor: 4.0}, attention_dropout: 0.1}}",
        "data": "{train: [{uri: hf://org/rows}], heldOut: {fraction: 0.5}, packing: none, sampler: sequential}",
        "lora": "{useDora: true, targetModules: [q_proj]}",
        "training": "{epochs: 1.5, globalBatchSize: 16, microBatchSize: 4, "
        "schedule: {type: warmupStableDecay, warmupSteps: 5, decaySteps: 5}, loss: dft, labelSmoothing: 0, "
        "optimizer: {type: muon, momentum: 0.9}, "
        "routerAuxLossCoefficient: 0.001, precision: fp32, evaluation: {everyEpochs: 0.25, earlyStopping: {}}}",
        "checkpoint": "{everyEpochs: 1, keep: {best: 1}}",
    }
)

# What no manifest with fields of the other strategy has.
MEGATRON = manifest(
    {
        "model": "{uri: hf://org/name, configOverrides: {attention_dropout: 0, residual_dropout: 0.0}}",
        "training": "{globalBatchSize: 4, schedule: {type: cosineWithRestarts, cycles: 2}}",
        "strategy": "{megatron: {tensorParallelDegree: 2, contextParallelDegree: 2, pipelineParallelDegree: 2, "
        "virtualPipelineParallelDegree: 1, expertParallelDegree: 8, sequenceParallel: true, "
        "transformerConfigOverrides: {num_layers_in_first_pipeline_stage: 3, "
        "num_layers_in_last_pipeline_stage: 1, batch_p2p_comm: false, deallocate_pipeline_outputs: false, "
        "moe_router_dtype: fp64}}}",
        "compute": "{nodes: 2, gpusPerNode: 8}",
    }
)

# At the bounds of rules on fields of the model's config, which are numbers with and without a point.
OVERRIDES_AT_THEIR_BOUNDS = manifest(
    {
        "model": "{uri: hf://org/name, configOverrides: {rope_parameters: {rope_type: yarn, factor: 2, "
        "original_max_position_embeddings: 2048, beta_slow: 31.5}, max_position_embeddings: 4096, "
        "attention_dropout: 0.5}}",
        "data": "{train: [{uri: hf://org/rows}], maxLength: 4096}",
        "training": "{globalBatchTokens: 8192}",
        "compute": "{gpusPerNode: 0}",
    }
)

_LONG_URI = "s3://bucket/" + "a" * 1012
_LONG_STORE, _LONG_EXPORT = "s3://bucket/" + "b" * 1012, "s3://bucket/" + "c" * 1012
_LONG_NAME = "a" * 253
_MAP = ", ".join(f"{'d' * 200}.example.com/{'n' * 60}{number}: {'v' * 63}" for number in range(32))
_RESOURCES = ", ".join(f"{'d' * 200}.example.com/{'n' * 60}{number}: {'9' * 18}" for number in range(16))

_ARGUMENTS = ", ".join(f"{'a' * 60}{number}: {'v' * 1024}" for number in range(16))
_TOLERATIONS = [f"{{key: {'k' * 317}, value: {'v' * 63}}}"] * 32
_CALLBACKS = ", ".join([f"{{class: '{'m' * 200}:{'C' * 55}', arguments: {{{_ARGUMENTS}}}}}"] * 16)
_LONG_MODULES = ", ".join(["m" * 253] * 128)
_LONG_TOKENS = ", ".join(["t" * 128] * 1024)

# Every list, map and string with a rule at its bound: what the rules cost is counted while they are evaluated.
LARGEST = manifest(
    {
        "model": f"{{uri: '{_LONG_URI}', tokenizerUri: '{_LONG_URI}', chatTemplate: '{'a' * 65535}{{', "
        f"addedTokens: [{_LONG_TOKENS}], addedSpecialTokens: [{', '.join(['s' * 128] * 128)}]}}",
        "lora": f"{{targetModules: [{_LONG_MODULES}], excludeModules: [{_LONG_MODULES}], adapterUri: '{_LONG_URI}'}}",
        "data": "{train: ["
        + ", ".join([f"{{uri: '{_LONG_URI}', weight: 1}}"] * 64)
        + "], eval: ["
        + ", ".join(f"{{uri: '{_LONG_URI}', name: {'n' * 60}{number}}}" for number in range(16))
        + "]}",
        "training": f"{{trainableModules: [{_LONG_MODULES}], callbacks: [{_CALLBACKS}]}}",
        "strategy": "{fsdp: {shardDegree: 64, sequenceParallelDegree: 64}}",
        "compute": f"{{gpusPerNode: 64, labels: {{{_MAP}}}, annotations: {{{_MAP}}}, nodeSelector: {{{_MAP}}}, "
        f"resources: {{requests: {{{_RESOURCES}}}, limits: {{{_RESOURCES}}}}}, imagePullSecrets: "
        f"[{', '.join([_LONG_NAME] * 8)}], tolerations: [{', '.join(_TOLERATIONS)}], env: ["
        + ", ".join(f"{{name: {'A' * 251}{number}, value: {'v' * 4096}}}" for number in range(10, 74))
        + "]}",
        "checkpoint": f"{{uri: '{_LONG_STORE}'}}",
        "export": f"{{uri: '{_LONG_EXPORT}'}}",
    },
    name="largest",
)

# What is only like what the rules refuse.
NEIGHBOURS = manifest(
    {
        "model": "{uri: s3://b/models/base/, tokenizerUri: s3://b/models/base-tokenizer}",
        "data": "{train: [{uri: s3://b/models/base.jsonl}, {uri: s3://b/.hidden/..rows}], "
        "eval: [{uri: hf://org/name.v1, name: a}, {uri: hf://org/name@refs/convert/parquet, name: b}]}",
        "compute": "{env: [{name: LD_PRELOAD, value: libjemalloc.so}, {name: HOME, value: /tmp}, "
        "{name: PYTHONHASHSEED, value: '0'}, {name: PATHS, value: a}], cacheSize: 1Mi, "
        "resources: {requests: {cpu: 10m, memory: 64Mi, hugepages-2Mi: 2Mi}, limits: {hugepages-2Mi: 2Mi}}}",
        "checkpoint": "{uri: s3://b/runs/one/, resume: {from: {uri: s3://b/runs/on}}}",
        "export": "{uri: s3://b/runs/one/export}",
    }
)

NOTHING_EXPORTED = manifest(
    {"model": "{uri: s3://b/base}", "export": "{atEnd: false, uri: s3://b/base}", "checkpoint": "{uri: s3://b/runs}"}
)

EXPERTS = manifest(
    {
        "lora": "{rank: 32, expertRank: 4, targetModules: [all-linear, experts, layers.3.mlp.experts.down_proj], "
        "excludeModules: [layers.0.mlp.experts], adapterUri: hf://org/adapters@v2, initMethod: kaiming, "
        "learningRateRatio: 16}",
        "training": "{schedule: {type: polynomial, power: 0.5}}",
    }
)

# Each rule on an item of a list where the item leaves out what has a default.
SHORT_ITEMS = manifest(
    {
        "data": "{train: [{uri: hf://org/rows, columns: {instruction: question}}, {uri: hf://org/rows, format: text}], "
        "eval: [{name: a, uri: hf://org/rows, columns: {text: body}}, {name: b, uri: hf://org/rows, format: alpaca}]}",
        "training": '{callbacks: [{class: "team.watch:Loss"}]}',
        "compute": "{tolerations: [{key: a}, {key: b, value: c}, {operator: Exists}]}",
    }
)

GOOD = {
    "shortest": SHORTEST,
    "nulls": NULLS,
    "numbers": NUMBERS,
    "aliases": ALIASES,
    "on the CPU": ON_THE_CPU,
    "every field, packed": EVERY_FIELD_PACKED,
    "every other field": EVERY_OTHER_FIELD,
    "the other strategy": MEGATRON,
    "overrides at their bounds": OVERRIDES_AT_THEIR_BOUNDS,
    "neighbours of the bad": NEIGHBOURS,
    "nothing exported": NOTHING_EXPORTED,
    "adapters of experts": EXPERTS,
    "short items": SHORT_ITEMS,
    "largest": LARGEST,
}
