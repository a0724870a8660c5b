"""Manifests that must be refused, by the API server and by the CLI alike: those against a rule."""

from tests.integration.bad_values import VALUES
from tests.integration.manifests import ROWS, Bad, train

_TOGETHER = (
    "that compute on the same tokens (strategy.fsdp.sequenceParallelDegree, or tensorParallelDegree x "
    "contextParallelDegree x pipelineParallelDegree of strategy.megatron)"
)
_SHARE = f"divided by those {_TOGETHER}"
_COMPUTED_IN_BF16 = (
    "training.parameterDtype: bf16 needs training.precision: bf16 (the default on GPUs alone): weights that are held "
    "in bf16 are computed with in bf16; or leave parameterDtype out"
)

RULES = [
    Bad(
        "columns the wrong way round",
        "spec.data.train[1].columns",
        {"data": train("{uri: hf://org/rows, columns: {question: instruction}}")},
        "names before the colons are those of the format (instruction, input, output, prompt, completion, text, "
        "input_ids, loss_mask, labels), those behind them the data's: write for example {instruction: question, "
        "output: answer}; messagesKey, toolsKey and systemKey tell the other ones",
    ),
    Bad(
        "columns of another format",
        "spec.data.train[1]",
        {"data": train("{uri: hf://org/rows, format: shareGPT, columns: {text: body}}")},
        "columns names a column that the format does not have: leave it out, or correct format",
    ),
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
        "decay twice",
        "spec.training.schedule",
        {"training": "{schedule: {type: warmupStableDecay, decayRatio: 0.1, decaySteps: 10}}"},
        "give schedule.decayRatio or schedule.decaySteps, not both",
    ),
    Bad(
        "decay of a shape that has its own",
        "spec.training.schedule",
        {"training": "{schedule: {type: cosine, decaySteps: 10}}"},
        "schedule.decayRatio and schedule.decaySteps are for type warmupStableDecay alone",
    ),
    Bad(
        "a polynomial of no power",
        "spec.training.schedule",
        {"training": "{schedule: {type: polynomial}}"},
        "schedule type polynomial needs schedule.power, such as 2; 1 is type linear",
    ),
    Bad(
        "a power of a shape that has none",
        "spec.training.schedule",
        {"training": "{schedule: {power: 2}}"},
        "schedule.power is for type polynomial alone",
    ),
    Bad(
        "restarts of no number",
        "spec.training.schedule",
        {"training": "{schedule: {type: cosineWithRestarts}}"},
        "schedule type cosineWithRestarts needs schedule.cycles, 2 or more; 1 is type cosine",
    ),
    Bad(
        "a number of restarts of a shape that has none",
        "spec.training.schedule",
        {"training": "{schedule: {type: cosine, cycles: 2}}"},
        "schedule.cycles is for type cosineWithRestarts alone",
    ),
    Bad(
        "a momentum of AdamW",
        "spec.training.optimizer",
        {"training": "{optimizer: {type: adamw, momentum: 0.9}}"},
        "optimizer.momentum is for type muon alone: of adamw it is the first of optimizer.betas",
    ),
    Bad(
        "a momentum of nobody",
        "spec.training.optimizer",
        {"training": "{optimizer: {momentum: 0.9}}"},
        "optimizer.momentum is for type muon alone: of adamw it is the first of optimizer.betas",
    ),
    Bad(
        "a momentum in 8 bits",
        "spec.training.optimizer",
        {"training": "{optimizer: {type: muon, stateDtype: int8}}"},
        "optimizer type muon has its momentum in fp32 or bf16: set optimizer.stateDtype to one of these",
    ),
    Bad(
        "matrices orthogonalised by the host",
        "spec",
        {"training": "{optimizer: {type: muon}}", "strategy": "{fsdp: {cpuOffload: true}}"},
        "training.optimizer.type: muon multiplies matrices, and strategy.fsdp.cpuOffload has updates made by the "
        "host's processors, which would take minutes for each: leave one of them out",
    ),
    Bad(
        "a loss of the right token, and of all",
        "spec.training",
        {"training": "{loss: dft, labelSmoothing: 0.1}"},
        "training.loss: dft is of the right token alone, and training.labelSmoothing of all: leave one out",
    ),
    Bad(
        "constant with warm-up",
        "spec.training.schedule",
        {"training": "{schedule: {type: constant, warmupSteps: 10}}"},
        "schedule type constant has no warm-up: use constantWithWarmup",
    ),
    Bad(
        "a memory snapshot without GPUs",
        "spec",
        {"monitoring": "{memorySnapshot: {}}", "compute": "{gpusPerNode: 0}"},
        "monitoring.memorySnapshot records what is allocated on GPUs: it needs compute.gpusPerNode",
    ),
    Bad(
        "early stopping without evaluations",
        "spec.training.evaluation",
        {"training": "{evaluation: {earlyStopping: {}}}"},
        "training.evaluation.earlyStopping needs training.evaluation.everySteps or everyEpochs: how often to look",
    ),
    Bad(
        "evaluations in steps and in passes",
        "spec.training.evaluation",
        {
            "data": f"{{{ROWS}, eval: [{{name: a, uri: hf://org/rows}}]}}",
            "training": "{evaluation: {everySteps: 10, everyEpochs: 1}}",
        },
        "give training.evaluation.everySteps or training.evaluation.everyEpochs, not both",
    ),
    Bad(
        "saves in steps and in passes",
        "spec.checkpoint",
        {"checkpoint": "{everySteps: 10, everyEpochs: 0.5}"},
        "give checkpoint.everySteps or checkpoint.everyEpochs, not both",
    ),
    Bad(
        "a callback without a colon",
        "spec.training.callbacks[0].class",
        {"training": "{callbacks: [{class: my_team.watch.StopAtLoss}]}"},
        "must be package.module:Class, where Python finds it in the image; put a colon before the name of the class",
    ),
    Bad(
        "a callback with a space",
        "spec.training.callbacks[0].class",
        {"training": '{callbacks: [{class: "my team:StopAtLoss"}]}'},
        "must be package.module:Class, where Python finds it in the image",
    ),
    Bad(
        "an argument that Python has no name for",
        "spec.training.callbacks[0].arguments",
        {"training": '{callbacks: [{class: "watch:Stop", arguments: {stop-at: "1"}}]}'},
        "names of arguments are those of Python: letters, digits and _, at most 63",
    ),
    Bad(
        "no parameters",
        "spec.model.parameters",
        {"model": "{uri: hf://org/name, parameters: 0.00B}"},
        "no model has no parameters: give their number, such as 8B, or leave it out",
    ),
    Bad(
        "parameters without a unit",
        "spec.model.parameters",
        {"model": "{uri: hf://org/name, parameters: '8000000000'}"},
        "must be a number of parameters such as 8B, 0.6B or 350M",
    ),
    Bad(
        "an added token with white space around it",
        "spec.model.addedTokens[1]",
        {"model": '{uri: hf://org/name, addedTokens: [<a>, " <b>"]}'},
        "must be a token as it stands in texts, such as <ticket>: in one line, and without white space around it",
    ),
    Bad(
        "an added token that is special and is not",
        "spec.model",
        {"model": "{uri: hf://org/name, addedTokens: [<a>, <b>], addedSpecialTokens: [<b>]}"},
        "model.addedTokens and model.addedSpecialTokens have a token in common, which is special or is not: leave it "
        "in one of them",
    ),
    Bad(
        "yarn without the length that it scales",
        "spec.model.configOverrides.rope_parameters",
        {"model": "{uri: hf://org/name, configOverrides: {rope_parameters: {rope_type: yarn, factor: 4}}}"},
        "rope_type yarn needs factor, original_max_position_embeddings, may have rope_theta, attention_factor, "
        "beta_fast, beta_slow, truncate, and takes nothing else",
    ),
    Bad(
        "a field of yarn in linear scaling",
        "spec.model.configOverrides.rope_parameters",
        {
            "model": "{uri: hf://org/name, configOverrides: {rope_parameters: {rope_type: linear, factor: 4, "
            "beta_fast: 32}}}"
        },
        "rope_type linear needs factor, may have rope_theta, and takes nothing else",
    ),
    Bad(
        "a factor without scaling",
        "spec.model.configOverrides.rope_parameters",
        {"model": "{uri: hf://org/name, configOverrides: {rope_parameters: {rope_type: default, factor: 4}}}"},
        "rope_type default scales nothing, may have rope_theta, and takes nothing else",
    ),
    Bad(
        "llama3 without its bounds",
        "spec.model.configOverrides.rope_parameters",
        {
            "model": "{uri: hf://org/name, configOverrides: {rope_parameters: {rope_type: llama3, factor: 4, "
            "original_max_position_embeddings: 8192}}}"
        },
        "rope_type llama3 needs factor, original_max_position_embeddings, low_freq_factor, high_freq_factor, may have "
        "rope_theta, and takes nothing else",
    ),
    Bad(
        "more positions than yarn scales",
        "spec.model.configOverrides",
        {
            "model": "{uri: hf://org/name, configOverrides: {rope_parameters: {rope_type: yarn, factor: 2.0, "
            "original_max_position_embeddings: 32768}, max_position_embeddings: 65537}}"
        },
        "max_position_embeddings must be at most factor * original_max_position_embeddings: so far yarn scales",
    ),
    Bad(
        "bounds of yarn the wrong way round",
        "spec.model.configOverrides.rope_parameters",
        {
            "model": "{uri: hf://org/name, configOverrides: {rope_parameters: {rope_type: yarn, factor: 4, "
            "original_max_position_embeddings: 32768, beta_fast: 1, beta_slow: 32}}}"
        },
        "beta_slow (1 where absent) must be less than beta_fast (32 where absent)",
    ),
    Bad(
        "one bound of yarn, beyond the other where it is absent",
        "spec.model.configOverrides.rope_parameters",
        {
            "model": "{uri: hf://org/name, configOverrides: {rope_parameters: {rope_type: yarn, factor: 4, "
            "original_max_position_embeddings: 32768, beta_slow: 64}}}"
        },
        "beta_slow (1 where absent) must be less than beta_fast (32 where absent)",
    ),
    Bad(
        "the other bound of yarn, at the one where it is absent",
        "spec.model.configOverrides.rope_parameters",
        {
            "model": "{uri: hf://org/name, configOverrides: {rope_parameters: {rope_type: yarn, factor: 4, "
            "original_max_position_embeddings: 32768, beta_fast: 1}}}"
        },
        "beta_slow (1 where absent) must be less than beta_fast (32 where absent)",
    ),
    Bad(
        "bounds of llama3 the wrong way round",
        "spec.model.configOverrides.rope_parameters",
        {
            "model": "{uri: hf://org/name, configOverrides: {rope_parameters: {rope_type: llama3, factor: 4, "
            "original_max_position_embeddings: 8192, low_freq_factor: 4, high_freq_factor: 1}}}"
        },
        "low_freq_factor must be less than high_freq_factor",
    ),
    Bad(
        "memory of a GPU in bytes",
        "spec.compute.gpuMemory",
        {"compute": "{gpuMemory: 80}"},
        "must be at least 1Gi: 80 alone is 80 bytes; write 80Gi",
    ),
    Bad(
        "several slices of a GPU",
        "spec.compute",
        {"compute": "{gpuResourceName: nvidia.com/mig-1g.10gb, gpusPerNode: 2}"},
        "a pod trains on one slice of a GPU (MIG): give compute.gpusPerNode: 1, and a larger slice in "
        "compute.gpuResourceName where that is too little",
    ),
    Bad(
        "all linear layers and names",
        "spec.lora",
        {"lora": "{targetModules: [all-linear, experts, q_proj]}"},
        "lora.targetModules is all-linear, or names of modules: not both, but for names of experts",
    ),
    Bad(
        "a rank of experts that get no adapters",
        "spec.lora",
        {"lora": "{expertRank: 4, targetModules: [xexperts, experts.0.up_proj]}"},
        "lora.expertRank is that of experts: name them in lora.targetModules (experts), or leave it out",
    ),
    Bad(
        "adapters of experts with dropout",
        "spec.lora",
        {"lora": "{dropout: 0.05, targetModules: [mlp.experts.down_proj]}"},
        "lora.dropout is of linear layers, and lora.targetModules names experts, which have none: leave one out",
    ),
    Bad(
        "first values of adapters that begin as others",
        "spec.lora",
        {"lora": "{adapterUri: hf://org/adapters, initMethod: gaussian}"},
        "lora.initMethod is that of new adapters, and lora.adapterUri names some: leave one out",
    ),
    Bad(
        "magnitudes of experts",
        "spec.lora",
        {"lora": "{useDora: true, targetModules: [experts]}"},
        "lora.useDora is of linear layers, and lora.targetModules names experts: leave one out",
    ),
    Bad(
        "magnitudes with dropout",
        "spec.lora",
        {"lora": "{useDora: true, dropout: 0.1}"},
        "lora.dropout is not there with lora.useDora, which computes with the sum of both: leave one out",
    ),
    Bad(
        "magnitudes of adapters that begin as others",
        "spec.lora",
        {"lora": "{useDora: true, adapterUri: hf://org/adapters}"},
        "lora.adapterUri names adapters as LoRA has them, and lora.useDora is true: leave one out",
    ),
    Bad(
        "adapters and a checkpoint to begin from",
        "spec",
        {"lora": "{adapterUri: hf://org/adapters}", "checkpoint": "{resume: {from: {uri: s3://b/run}}}"},
        "lora.adapterUri and checkpoint.resume.from both say from which adapters training starts: leave one out",
    ),
    Bad(
        "all linear layers excluded",
        "spec.lora",
        {"lora": "{excludeModules: [all-linear]}"},
        "lora.excludeModules names modules: with all-linear nothing would be left to train",
    ),
    Bad(
        "a pattern of modules",
        "spec.lora.targetModules[0]",
        {"lora": '{targetModules: [".*_proj"]}'},
        "must be the name of a module, whole or its end (q_proj, self_attn.q_proj), or all-linear; no pattern",
    ),
    Bad(
        "a pattern of modules that are trained",
        "spec.training.trainableModules[1]",
        {"training": '{trainableModules: [lm_head, "layers.*"]}'},
        "must be the name of a module, whole or its end (layers.27, mlp.down_proj, lm_head); no pattern",
    ),
    Bad(
        "the best exported and not kept",
        "spec",
        {"export": "{checkpoint: best}"},
        "export.checkpoint: best needs checkpoint.keep.best, at least 1: the best must still be there at the end",
    ),
    Bad(
        "exported on the way and never saved",
        "spec",
        {"export": "{everySteps: 100}"},
        "export.everySteps must be a multiple of checkpoint.everySteps, the steps that are saved",
    ),
    Bad(
        "exported on the way between two saves",
        "spec",
        {"checkpoint": "{everySteps: 40}", "export": "{everySteps: 100}"},
        "export.everySteps must be a multiple of checkpoint.everySteps, the steps that are saved",
    ),
    Bad(
        "exported on the way and not at the end",
        "spec",
        {"checkpoint": "{everySteps: 40}", "export": "{atEnd: false, everySteps: 80}"},
        "export.everySteps is for exports besides the one at the end: leave export.atEnd out",
    ),
    Bad(
        "uploaded and not exported",
        "spec",
        {"export": "{atEnd: false, hub: {repository: org/mine}}"},
        "export.hub gets a copy of the export at the end: leave export.atEnd out",
    ),
    Bad(
        "merged without adapters",
        "spec",
        {"export": "{mergeAdapter: true}"},
        "export.mergeAdapter needs lora: without it the whole model is exported",
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
        {"data": f"{{{ROWS}, packing: none}}", "training": "{globalBatchTokens: 65536}"},
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
        f"training.globalBatchSize must be divisible by the number of processes (nodes x processes per node), {_SHARE}",
    ),
    Bad(
        "batch not divisible on the CPU",
        "spec",
        {"training": "{globalBatchSize: 8}", "compute": "{gpusPerNode: 0, processesPerNode: 3}"},
        f"training.globalBatchSize must be divisible by the number of processes (nodes x processes per node), {_SHARE}",
    ),
    Bad(
        "share of a process not divisible by the micro-batch",
        "spec",
        {"data": f"{{{ROWS}, packing: none}}", "training": "{globalBatchSize: 8, microBatchSize: 3}"},
        "training.globalBatchSize must be divisible by the number of processes times training.microBatchSize, "
        f"{_SHARE}",
    ),
    Bad(
        "token batch below one micro-batch a process",
        "spec",
        {"training": "{globalBatchTokens: 32767}", "compute": "{gpusPerNode: 8}"},
        "training.globalBatchTokens must hold one full micro-batch (training.maxTokensPerMicroBatch, or "
        f"data.maxLength) on every process, or group of those {_TOGETHER}",
    ),
    Bad(
        "shard degree that does not divide",
        "spec",
        {"strategy": "{fsdp: {shardDegree: 3}}", "compute": "{gpusPerNode: 8}"},
        "strategy.fsdp.shardDegree must divide the number of processes (compute.nodes x processes per node)",
    ),
    Bad(
        "sums of a whole step in bf16",
        "spec.strategy.fsdp",
        {"strategy": "{fsdp: {reduceGradients: oncePerStep, reduceDtype: bf16}}"},
        "strategy.fsdp.reduceGradients: oncePerStep needs strategy.fsdp.reduceDtype: fp32: in bf16 what the last "
        "micro-batches of a step add would get lost",
    ),
    Bad(
        "gradients of a whole model beside an offloaded one",
        "spec.strategy.fsdp",
        {"strategy": "{fsdp: {reduceGradients: oncePerStep, cpuOffload: true}}"},
        "strategy.fsdp.reduceGradients: oncePerStep holds the gradients of the whole model on each GPU, and "
        "strategy.fsdp.cpuOffload none: leave one of them out",
    ),
    Bad(
        "shared tokens that do not divide the processes",
        "spec",
        {"strategy": "{fsdp: {sequenceParallelDegree: 3}}", "compute": "{gpusPerNode: 8}"},
        "strategy.fsdp.sequenceParallelDegree must divide the number of processes (compute.nodes x processes per node)",
    ),
    Bad(
        "more processes that share tokens than there are",
        "spec",
        {
            "strategy": "{fsdp: {sequenceParallelDegree: 8}}",
            "compute": "{gpusPerNode: 4}",
            "training": "{globalBatchSize: 4}",
        },
        "strategy.fsdp.sequenceParallelDegree must divide the number of processes (compute.nodes x processes per node)",
    ),
    Bad(
        "a copy over less than the processes that share its tokens",
        "spec",
        {"strategy": "{fsdp: {shardDegree: 2, sequenceParallelDegree: 4}}", "compute": "{gpusPerNode: 8}"},
        "strategy.fsdp.shardDegree must be a multiple of strategy.fsdp.sequenceParallelDegree: processes that share "
        "tokens share a copy of the model",
    ),
    Bad(
        "batch not divisible by the groups that share tokens",
        "spec",
        {
            "strategy": "{fsdp: {sequenceParallelDegree: 2}}",
            "training": "{globalBatchSize: 6}",
            "compute": "{gpusPerNode: 8}",
        },
        f"training.globalBatchSize must be divisible by the number of processes (nodes x processes per node), {_SHARE}",
    ),
    Bad(
        "two strategies",
        "spec.strategy",
        {"strategy": "{fsdp: {}, megatron: {}}"},
        "give strategy.fsdp or strategy.megatron, not both",
    ),
    Bad(
        "tokens shared by processes that share no matrix",
        "spec.strategy.megatron",
        {"strategy": "{megatron: {pipelineParallelDegree: 2, sequenceParallel: true}}", "compute": "{gpusPerNode: 2}"},
        "strategy.megatron.sequenceParallel needs tensorParallelDegree, more than 1: it is those processes that share "
        "tokens",
    ),
    Bad(
        "chunks of one stage",
        "spec.strategy.megatron",
        {"strategy": "{megatron: {virtualPipelineParallelDegree: 2}}", "compute": "{gpusPerNode: 2}"},
        "strategy.megatron.virtualPipelineParallelDegree needs pipelineParallelDegree, more than 1: it is those stages "
        "that have chunks",
    ),
    Bad(
        "what is said of stages where there is one",
        "spec.strategy.megatron",
        {
            "strategy": "{megatron: {transformerConfigOverrides: {moe_router_dtype: fp32, batch_p2p_comm: false}}}",
            "compute": "{gpusPerNode: 2}",
        },
        "strategy.megatron.transformerConfigOverrides: num_layers_in_first_pipeline_stage, "
        "num_layers_in_last_pipeline_stage, batch_p2p_comm, deallocate_pipeline_outputs are about stages, and need "
        "pipelineParallelDegree, more than 1",
    ),
    Bad(
        "experts and matrices spread, and whole tokens",
        "spec.strategy.megatron",
        {
            "strategy": "{megatron: {tensorParallelDegree: 2, expertParallelDegree: 2, sequenceParallel: false}}",
            "compute": "{gpusPerNode: 2}",
        },
        "strategy.megatron.expertParallelDegree with tensorParallelDegree needs sequenceParallel: leave it out",
    ),
    Bad(
        "matrices and stages that do not divide the processes",
        "spec",
        {
            "strategy": "{megatron: {tensorParallelDegree: 2, pipelineParallelDegree: 3}}",
            "compute": "{gpusPerNode: 8}",
        },
        "strategy.megatron.tensorParallelDegree x contextParallelDegree x pipelineParallelDegree must divide the "
        "number of processes (compute.nodes x processes per node)",
    ),
    Bad(
        "tokens, matrices and stages that do not divide the processes",
        "spec",
        {
            "strategy": "{megatron: {tensorParallelDegree: 2, contextParallelDegree: 8}}",
            "compute": "{gpusPerNode: 8}",
        },
        "strategy.megatron.tensorParallelDegree x contextParallelDegree x pipelineParallelDegree must divide the "
        "number of processes (compute.nodes x processes per node)",
    ),
    Bad(
        "experts that do not divide the processes of a stage",
        "spec",
        {
            "strategy": "{megatron: {pipelineParallelDegree: 2, expertParallelDegree: 8}}",
            "compute": "{gpusPerNode: 8}",
        },
        "strategy.megatron.expertParallelDegree must divide the processes of a stage (compute.nodes x processes per "
        "node, divided by pipelineParallelDegree)",
    ),
    Bad(
        "batch not divisible by the processes that have a share together",
        "spec",
        {
            "strategy": "{megatron: {contextParallelDegree: 2, pipelineParallelDegree: 2}}",
            "training": "{globalBatchSize: 3}",
            "compute": "{gpusPerNode: 8}",
        },
        f"training.globalBatchSize must be divisible by the number of processes (nodes x processes per node), {_SHARE}",
    ),
    Bad(
        "adapters under Megatron",
        "spec",
        {"strategy": "{megatron: {}}", "lora": "{}"},
        "strategy.megatron trains all weights: leave lora out, or choose strategy.fsdp",
    ),
    Bad(
        "some modules under Megatron",
        "spec",
        {"strategy": "{megatron: {}}", "training": "{trainableModules: [lm_head]}"},
        "strategy.megatron trains all weights: leave training.trainableModules out, or choose strategy.fsdp",
    ),
    Bad(
        "compiled layers of Megatron",
        "spec",
        {"strategy": "{megatron: {}}", "training": "{compile: true}"},
        "strategy.megatron knows no training.compile: leave it out, or choose strategy.fsdp",
    ),
    Bad(
        "Muon under Megatron",
        "spec",
        {"strategy": "{megatron: {}}", "training": "{optimizer: {type: muon}}"},
        "strategy.megatron knows no training.optimizer.type: muon; leave it out, or choose strategy.fsdp",
    ),
    Bad(
        "moments in bf16 under Megatron",
        "spec",
        {"strategy": "{megatron: {}}", "training": "{optimizer: {stateDtype: bf16}}"},
        "strategy.megatron needs training.optimizer.stateDtype: fp32; or choose strategy.fsdp",
    ),
    Bad(
        "weights in bf16 under Megatron",
        "spec",
        {"strategy": "{megatron: {}}", "training": "{parameterDtype: bf16}"},
        "strategy.megatron needs training.parameterDtype: fp32; or choose strategy.fsdp",
    ),
    Bad(
        "weights in bf16 that are computed with in fp32",
        "spec",
        {"training": "{parameterDtype: bf16, precision: fp32}"},
        _COMPUTED_IN_BF16,
    ),
    Bad(
        "weights in bf16 on a CPU that nobody told to compute in bf16",
        "spec",
        {"training": "{parameterDtype: bf16}", "compute": "{gpusPerNode: 0}"},
        _COMPUTED_IN_BF16,
    ),
    Bad(
        "adapters in bf16",
        "spec",
        {"training": "{parameterDtype: bf16}", "lora": "{}"},
        "training.parameterDtype: bf16 is for weights of the model's own, and lora trains adapters, which are fp32 and "
        "small: leave one of them out (lora.basePrecision says how the frozen weights are held)",
    ),
    Bad(
        "a loss of routers under Megatron",
        "spec",
        {"strategy": "{megatron: {}}", "training": "{routerAuxLossCoefficient: 0.001}"},
        "strategy.megatron knows no training.routerAuxLossCoefficient, which is a loss of all layers together: leave "
        "it out, or choose strategy.fsdp",
    ),
    Bad(
        "dropout under Megatron",
        "spec",
        {
            "strategy": "{megatron: {}}",
            "model": "{uri: hf://org/name, configOverrides: {residual_dropout: 0.1, hidden_dropout: 0}}",
        },
        "strategy.megatron knows no dropout: set attention_dropout in model.configOverrides to 0 and leave the others "
        "out, which its models do not have; or choose strategy.fsdp",
    ),
    Bad(
        "attention that drops, compiled",
        "spec",
        {
            "model": "{uri: hf://org/name, configOverrides: {attention_dropout: 0.1}}",
            "training": "{compile: true}",
            "compute": "{gpusPerNode: 0}",
        },
        "model.configOverrides.attention_dropout (or attention_probs_dropout_prob) has attention computed "
        "document by document, which cannot be compiled: set it to 0, or leave training.compile out",
    ),
    Bad(
        "attention that drops, on GPUs",
        "spec",
        {"model": "{uri: hf://org/name, configOverrides: {attention_dropout: 0.1}}", "compute": "{gpusPerNode: 1}"},
        "model.configOverrides.attention_dropout (or attention_probs_dropout_prob) must be 0 on GPUs, whose "
        "kernel knows none, but with training.precision: fp32",
    ),
    Bad(
        "examples longer than the model is said to be for",
        "spec",
        {
            "model": "{uri: hf://org/name, configOverrides: {max_position_embeddings: 2048}}",
            "data": "{train: [{uri: hf://org/rows}], maxLength: 2049}",
        },
        "data.maxLength must be at most model.configOverrides.max_position_embeddings, the longest document that the "
        "model is said to be for",
    ),
    Bad(
        "examples longer than yarn scales",
        "spec",
        {
            "model": "{uri: hf://org/name, configOverrides: {rope_parameters: {rope_type: yarn, factor: 2, "
            "original_max_position_embeddings: 2048}}}",
            "data": "{train: [{uri: hf://org/rows}], maxLength: 4097}",
        },
        "data.maxLength must be at most factor * original_max_position_embeddings in "
        "model.configOverrides.rope_parameters: so far yarn scales",
    ),
    Bad(
        "best without evaluation",
        "spec",
        {"checkpoint": "{keep: {best: 1}}"},
        "checkpoint.keep.best needs data.eval or data.heldOut: the best is the one with the lowest evaluation loss",
    ),
    Bad(
        "kept for ever and never saved",
        "spec",
        {"checkpoint": "{keep: {everySteps: 100}}"},
        "checkpoint.keep.everySteps must be a multiple of checkpoint.everySteps, the steps that are saved",
    ),
    Bad(
        "kept for ever between two saves",
        "spec",
        {"checkpoint": "{everySteps: 40, keep: {everySteps: 100}}"},
        "checkpoint.keep.everySteps must be a multiple of checkpoint.everySteps, the steps that are saved",
    ),
    Bad(
        "evaluation of nothing",
        "spec",
        {"training": "{evaluation: {everySteps: 10}}"},
        "training.evaluation needs data.eval or data.heldOut: name the data to evaluate on, or hold rows out",
    ),
    Bad(
        "evaluation of nothing after each pass",
        "spec",
        {"training": "{evaluation: {everyEpochs: 1}}"},
        "training.evaluation needs data.eval or data.heldOut: name the data to evaluate on, or hold rows out",
    ),
    Bad(
        "evaluation of an empty list",
        "spec",
        {"data": f"{{{ROWS}, eval: []}}", "training": "{evaluation: {beforeTraining: true}}"},
        "training.evaluation needs data.eval or data.heldOut: name the data to evaluate on, or hold rows out",
    ),
    Bad(
        "evaluation names twice",
        "spec.data",
        {"data": f"{{{ROWS}, eval: [{{name: a, uri: hf://org/rows}}, {{name: a, uri: hf://org/other}}]}}"},
        "names of data.eval must differ: each names its own metric",
    ),
    Bad(
        "an evaluation set that is called as the rows held out are",
        "spec.data",
        {"data": f"{{{ROWS}, eval: [{{name: held-out, uri: hf://org/rows}}], heldOut: {{fraction: 0.05}}}}"},
        "data.eval has a set called held-out, as data.heldOut calls its own: give it another name",
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
    *(
        Bad(
            f"begins from its own place: {uri}",
            "spec",
            {"checkpoint": f"{{uri: s3://b/runs/one, resume: {{from: {{uri: '{uri}'}}}}}}"},
            "checkpoint.uri must be neither checkpoint.resume.from.uri nor above or below it: that is the place of "
            "another run; the same run goes on by itself",
        )
        for uri in ("s3://b/runs/one/", "s3://b/runs", "s3://b/runs/one/checkpoints")
    ),
    *(
        Bad(
            f"exports into the place it begins from: {checkpoint} {export}",
            "spec",
            {"checkpoint": f"{{resume: {{from: {{uri: s3://b/other}}}}{checkpoint}}}", "export": export},
            "export.uri (export/ in checkpoint.uri when absent) must be neither checkpoint.resume.from.uri nor above "
            "or below it: the export would be written into the place of the other run",
        )
        for checkpoint, export in (("", "{uri: s3://b/other/export}"), (", uri: s3://b/mine", "{uri: s3://b/}"))
    ),
    *(
        Bad(
            f"Delete of a place that is {what}",
            "spec",
            {"deletionPolicy": "Delete", "checkpoint": f"{{uri: {uri}}}"},
            "deletionPolicy: Delete needs a place in the platform's store (s3://…, or no checkpoint.uri): the operator "
            "can remove nothing from claims and folders; set deletionPolicy to Keep, or name another place",
        )
        for what, uri in (("a claim", "pvc://claim/run"), ("a folder", "file:///run"))
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
    *VALUES,
]
