"""Manifests from files: which documents count, and how every fault is said."""

from pathlib import Path

import pytest

from sft_api.openapi import structural_schema
from sft_api.v1alpha1.job import SFTJob
from sft_cli.manifest import ManifestError, load_manifest, load_manifests, load_overridden
from sft_cli.overrides import read_override
from sft_cli.problems import field_path
from sft_cli.remedies import _OTHER_NAMES, field_paths

MINIMAL = """\
apiVersion: sftjob.dev/v1alpha1
kind: SFTJob
metadata: {name: job}
spec:
  model: {uri: hf://org/name}
  data: {train: [{uri: hf://org/rows}]}
  compute: {}
"""
SECRET = "apiVersion: v1\nkind: Secret\nmetadata: {name: keys}\n"


def job(spec: str) -> str:
    """The minimal manifest with a line of its spec replaced (same first word) or added."""
    word = spec.split(":")[0]
    kept = [line for line in MINIMAL.splitlines() if not line.startswith(f"  {word}:")]
    return "\n".join([*kept, f"  {spec}", ""])


def problems(text: str) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        load_manifests(text)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


def test_a_file_or_text_gives_a_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())

    assert load_manifest(path) == load_manifest(MINIMAL)
    assert load_manifest(MINIMAL).metadata.name == "job"


def test_other_kinds_in_the_file_are_passed_over() -> None:
    assert load_manifest(f"{SECRET}---\n{MINIMAL}---\n").metadata.name == "job"


def test_lists_are_opened() -> None:
    items = MINIMAL.replace("\n", "\n  ")
    text = f"apiVersion: v1\nkind: List\nitems:\n- {items.rstrip()}\n"

    assert [found.metadata.name for found in load_manifests(text)] == ["job"]


def test_several_jobs_are_for_those_who_ask_for_several() -> None:
    text = f"{MINIMAL}---\n{MINIMAL.replace('name: job', 'name: other')}"

    assert [found.metadata.name for found in load_manifests(text)] == ["job", "other"]
    with pytest.raises(ManifestError, match=r"holds 2 SFTJobs \(job, other\): choose one with --job"):
        load_manifest(text)


def test_faults_of_several_jobs_say_which() -> None:
    text = f"{MINIMAL}---\n{job('suspend: 1')}"

    assert problems(text) == ["SFTJob 2 of 2: spec.suspend: must be true or false, got 1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the manifest holds no SFTJob: give apiVersion: sftjob.dev/v1alpha1 and kind: SFTJob"),
        (SECRET, "the manifest holds no SFTJob: give apiVersion: sftjob.dev/v1alpha1 and kind: SFTJob"),
        ("a: [", "the manifest is not a YAML file: line 1: "),
        (
            f"{MINIMAL}x: .nan",
            "the manifest cannot be sent to Kubernetes, which takes JSON: line 8: .nan is not a finite number",
        ),
        ("job.yaml", 'must be a map of fields, got "job.yaml"'),
        (MINIMAL.replace("kind: SFTJob", "kind: SftJob"), 'kind: must be SFTJob, got "SftJob"'),
        (MINIMAL.replace("kind: SFTJob\n", ""), "kind: is required"),
        (MINIMAL.replace("v1alpha1", "v1"), 'apiVersion: must be sftjob.dev/v1alpha1, got "sftjob.dev/v1"'),
    ],
)
def test_what_is_no_manifest(text: str, expected: str) -> None:
    (problem,) = problems(text)

    assert problem.startswith(expected)


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"absent\.yaml: No such file or directory"):
        load_manifest(tmp_path / "absent.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match=r"binary\.yaml is .*: it is not UTF-8 \(byte 0xff at position 0\)"):
        load_manifest(binary)


_STORE = "s3://bucket/prefix, pvc://claim/path or file:///absolute/path"
_MODEL = f"must be hf://org/name[@revision], {_STORE}"
_ABSOLUTE = "only an absolute path says the same everywhere: file:///absolute/path"
_BASE_PRECISION = "must be one of bf16, fp32, nf4, mxfp4"
_REPOSITORY = "must be org/name, a repository for models on the hub"
_BRANCH = "the branch is export.hub.revision"
_QUANTITY = "must be a quantity such as 2, 500m or 64Gi"

_SCHEDULES = (
    "must be one of constant, constantWithWarmup, linear, cosine, warmupStableDecay, polynomial, inverseSqrt, "
    "cosineWithRestarts"
)
SENTENCES = {
    "training: {steps: 1, epochs: 1}": "spec.training: give training.steps or training.epochs, not both; given: "
    "training.steps 1, training.epochs 1",
    "data: {train: [{uri: hf://org/rows}], maxlength: 5}": "unknown field spec.data.maxlength; did you mean maxLength?",
    "data: {train: [{uri: hf://org/rows}], max_length: 5}": "unknown field spec.data.max_length; did you mean "
    "maxLength?",
    "model: {uri: hf://org/name, max_length: 5}": "unknown field spec.model.max_length; did you mean "
    "spec.data.maxLength?",
    "lora: {r: 8}": "unknown field spec.lora.r; did you mean rank?",
    "model: {uri: hf://org/name, configOverrides: {rope_scaling: {}}}": "unknown field "
    "spec.model.configOverrides.rope_scaling; did you mean rope_parameters?",
    "model: {uri: hf://org/name, configOverrides: {rope_theta: 1e6}}": "unknown field "
    "spec.model.configOverrides.rope_theta; did you mean spec.model.configOverrides.rope_parameters.rope_theta?",
    "model: {uri: hf://org/name, configOverrides: {num_hidden_layers: 2}}": "unknown field "
    "spec.model.configOverrides.num_hidden_layers; allowed are rope_parameters, max_position_embeddings, "
    "sliding_window, attention_dropout, attention_probs_dropout_prob, hidden_dropout, hidden_dropout_prob, "
    "resid_pdrop, residual_dropout, embd_pdrop, embedding_dropout",
    "model: {uri: hf://org/name, configOverrides: {rope_parameters: {rope_type: linear, factor: 2, mscale: 1}}}": ""
    "unknown field spec.model.configOverrides.rope_parameters.mscale; allowed are rope_type, factor, "
    "original_max_position_embeddings, rope_theta, attention_factor, beta_fast, beta_slow, truncate, "
    "low_freq_factor, high_freq_factor",
    "strategy: {megatron: {transformerConfigOverrides: {tp_comm_overlap: true}}}": "unknown field "
    "spec.strategy.megatron.transformerConfigOverrides.tp_comm_overlap; allowed are "
    "num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage, batch_p2p_comm, "
    "deallocate_pipeline_outputs, moe_router_dtype",
    "model: {uri: hf://org/name, '': 1}": 'unknown field spec.model.""',
    "model: {uri: hf://org/name, configOverrides: {rope_parameters: {rope_type: linear, beta_fast: 2}}}": ""
    "spec.model.configOverrides.rope_parameters: rope_type linear needs factor, may have rope_theta, and takes nothing "
    "else; give factor and leave beta_fast out",
    "learningRate: 1e-5": "unknown field spec.learningRate; did you mean spec.training.optimizer.learningRate?",
    "name: job": "unknown field spec.name; did you mean metadata.name or spec.model.tokenSecretRef.name or "
    "spec.data.eval[].name?",
    "optim: adamw_torch": "unknown field spec.optim; did you mean spec.training.optimizer?",
    "optim: paged_adamw_8bit": "unknown field spec.optim; did you mean spec.training.optimizer.stateDtype: int8?",
    "training: {optimizer: adamw_bnb_8bit}": "spec.training.optimizer: must be a map of fields, got "
    '"adamw_bnb_8bit"; did you mean spec.training.optimizer.stateDtype: int8?',
    "training: {optimizer: {type: adamw_8bit}}": "spec.training.optimizer.type: must be one of adamw, muon, got "
    '"adamw_8bit"; did you mean spec.training.optimizer.stateDtype: int8?',
    "training: {optimizer: {type: adamw_torch_fused}}": "spec.training.optimizer.type: must be one of adamw, muon, got "
    '"adamw_torch_fused"; did you mean adamw?',
    "training: {optimizer: {type: Muon}}": 'spec.training.optimizer.type: must be one of adamw, muon, got "Muon"; did '
    "you mean muon?",
    "optim: muon": "unknown field spec.optim; did you mean spec.training.optimizer.type: muon?",
    "training: {optimizer: muon}": "spec.training.optimizer: must be a map of fields, got "
    '"muon"; did you mean spec.training.optimizer.type: muon?',
    "training: {use_muon: true}": "unknown field spec.training.use_muon; did you mean spec.training.optimizer.type: "
    "muon?",
    "training: {optimizer: {muon: true}}": "unknown field spec.training.optimizer.muon; did you mean "
    "spec.training.optimizer.type: muon?",
    "training: {momentum: 0.9}": "unknown field spec.training.momentum; did you mean spec.training.optimizer.momentum?",
    "training: {optimizer: {stateDtype: AdamW8bit}}": "spec.training.optimizer.stateDtype: must be one of fp32, bf16, "
    'int8, got "AdamW8bit"; did you mean int8?',
    "trackers: []": "unknown field spec.trackers; allowed are model, lora, data, training, strategy, compute, "
    "checkpoint, export, monitoring, suspend, runPolicy, deletionPolicy",
    "data: {train: [{url: hf://org/rows, uri: hf://org/rows}]}": "unknown field spec.data.train[0].url; did you mean "
    "uri?",
    "data: {train: [{split: train}]}": "spec.data.train[0].uri: is required",
    "data: {train: []}": "spec.data.train: must have at least 1 item, got 0",
    "data: {train: [{uri: hf://org/rows}], packing: bfd}": 'spec.data.packing: must be one of none, ffd, got "bfd"; '
    "did you mean ffd?",
    "training: {precision: fp16}": 'spec.training.precision: must be one of bf16, fp32, got "fp16"; did you mean bf16?',
    "training: {schedule: {type: step}}": f'spec.training.schedule.type: {_SCHEDULES}, got "step"',
    "data: {train: [{uri: hf://org/rows}], maxLength: 2000000}": "spec.data.maxLength: must be at most 1048576, "
    "got 2000000",
    "data: {train: [{uri: hf://org/rows}], maxLength: 1}": "spec.data.maxLength: must be at least 8, got 1",
    "data: {train: file:///rows.jsonl}": 'spec.data.train: must be a list, got "file:///rows.jsonl"; write '
    '[{uri: "file:///rows.jsonl"}]',
    "data: {train: {uri: hf://org/rows}}": "spec.data.train: must be a list, got a map; begin the entry with a dash",
    "compute: {imagePullSecrets: registry}": 'spec.compute.imagePullSecrets: must be a list, got "registry"; write '
    '["registry"]',
    "model: [hf://org/name]": "spec.model: must be a map of fields, got a list",
    "model: hf://org/name": 'spec.model: must be a map of fields, got "hf://org/name"; write {uri: "hf://org/name"}',
    "model: {uri: Qwen/Qwen3-0.6B}": f'spec.model.uri: {_MODEL}, got "Qwen/Qwen3-0.6B"; did you mean '
    "hf://Qwen/Qwen3-0.6B?",
    "model: {uri: Qwen/Qwen3-0.6B@main}": f'spec.model.uri: {_MODEL}, got "Qwen/Qwen3-0.6B@main"; did you mean '
    "hf://Qwen/Qwen3-0.6B@main?",
    "model: {uri: https://huggingface.co/Qwen/Qwen3-0.6B}": f"spec.model.uri: {_MODEL}, got "
    '"https://huggingface.co/Qwen/Qwen3-0.6B"; did you mean hf://Qwen/Qwen3-0.6B?',
    "model: {uri: https://huggingface.co/Qwen/Qwen3-0.6B/tree/main}": f"spec.model.uri: {_MODEL}, got "
    '"https://huggingface.co/Qwen/Qwen3-0.6B/tree/main"; did you mean hf://Qwen/Qwen3-0.6B@main?',
    "data: {train: [{uri: https://huggingface.co/datasets/allenai/tulu}]}": f"spec.data.train[0].uri: {_MODEL}, got "
    '"https://huggingface.co/datasets/allenai/tulu"; did you mean hf://allenai/tulu?',
    "model: {uri: file://tmp}": f'spec.model.uri: {_MODEL}, got "file://tmp"; did you mean file:///tmp?',
    "model: {uri: file://~/model}": f'spec.model.uri: {_MODEL}, got "file://~/model"; {_ABSOLUTE} '
    f"(here file://{Path.home()}/model)",
    "model: {uri: file://./model}": f'spec.model.uri: {_MODEL}, got "file://./model"; {_ABSOLUTE} '
    f"(here file://{Path.cwd()}/model)",
    "model: {uri: hf://Qwen/Qwen3-0.6B/tree/main}": f"spec.model.uri: {_MODEL}, got "
    '"hf://Qwen/Qwen3-0.6B/tree/main"; did you mean hf://Qwen/Qwen3-0.6B@main?',
    "data: {train: [{uri: hf://datasets/allenai/tulu}]}": f"spec.data.train[0].uri: {_MODEL}, got "
    '"hf://datasets/allenai/tulu"; did you mean hf://allenai/tulu?',
    "model: {uri: /models/a}": f'spec.model.uri: {_MODEL}, got "/models/a"; did you mean file:///models/a?',
    "model: {uri: ./model}": f'spec.model.uri: {_MODEL}, got "./model"; {_ABSOLUTE} (here file://{Path.cwd()}/model)',
    "model: {uri: ~/model}": f'spec.model.uri: {_MODEL}, got "~/model"; {_ABSOLUTE} (here file://{Path.home()}/model)',
    "data: {train: [{uri: data/rows.jsonl}]}": f'spec.data.train[0].uri: {_MODEL}, got "data/rows.jsonl"; {_ABSOLUTE}',
    **{
        f"data: {{train: [{{uri: {name}}}]}}": f'spec.data.train[0].uri: {_MODEL}, got "{name}"; {_ABSOLUTE}'
        for name in ("rows.ndjson", "data/rows.csv.gz", "data/rows.JSONL.ZST", "data/rows.tsv")
    },
    "checkpoint: {uri: ./out}": f"spec.checkpoint.uri: must be {_STORE}, got "
    f'"./out"; {_ABSOLUTE} (here file://{Path.cwd()}/out)',
    "model: {uri: hf://org/name, chatTemplate: ./t.jinja}": "spec.model.chatTemplate: must be the text of a Jinja "
    'template, not its place: put the text below chatTemplate: |, got "./t.jinja"',
    "runPolicy: {activeDeadlineSeconds: 10m}": "spec.runPolicy.activeDeadlineSeconds: must be a whole number, got "
    '"10m"; write 600',
    "checkpoint: {everySeconds: 1h30m}": 'spec.checkpoint.everySeconds: must be a whole number, got "1h30m"; write '
    "5400",
    "runPolicy: {activeDeadlineSeconds: 1.5h}": "spec.runPolicy.activeDeadlineSeconds: must be a whole number, got "
    '"1.5h"; write 5400',
    "runPolicy: {ttlSecondsAfterFinished: 1d}": "spec.runPolicy.ttlSecondsAfterFinished: must be a whole number, got "
    '"1d"; write 86400',
    "training: {steps: 10m}": 'spec.training.steps: must be a whole number, got "10m"',
    "compute: {cacheSize: 16g}": f'spec.compute.cacheSize: {_QUANTITY}, got "16g"; did you mean 16G?',
    "compute: {cacheSize: 16gb}": f'spec.compute.cacheSize: {_QUANTITY}, got "16gb"; did you mean 16Gi?',
    "compute: {cacheSize: 1.5 TiB}": f'spec.compute.cacheSize: {_QUANTITY}, got "1.5 TiB"; did you mean 1.5Ti?',
    "compute: {cacheSize: 20 Gi}": f'spec.compute.cacheSize: {_QUANTITY}, got "20 Gi"; did you mean 20Gi?',
    "compute: {cacheSize: much}": f'spec.compute.cacheSize: {_QUANTITY}, got "much"',
    "compute: {resources: {requests: {memory: 16GB}}}": f"spec.compute.resources.requests.memory: {_QUANTITY}, got "
    '"16GB"; did you mean 16Gi or 16G?',
    "training: {lr: 1e-5}": "unknown field spec.training.lr; did you mean spec.training.optimizer.learningRate?",
    "lora: {learningRate: 1e-4}": "unknown field spec.lora.learningRate; did you mean "
    "spec.training.optimizer.learningRate?",
    "tokens: [<a>]": "unknown field spec.tokens; did you mean spec.model.addedTokens?",
    "additionalTokens: [<a>]": "unknown field spec.additionalTokens; did you mean spec.model.addedTokens?",
    "resizeTokenEmbeddings: 8": "unknown field spec.resizeTokenEmbeddings; did you mean spec.model.addedTokens?",
    "lora: {trainable_token_indices: [3]}": "unknown field spec.lora.trainable_token_indices; did you mean "
    "spec.lora.trainableTokens?",
    "peft_trainable_token_indices: [3]": "unknown field spec.peft_trainable_token_indices; did you mean "
    "spec.lora.trainableTokens?",
    "training: {add_tokens: [<a>]}": "unknown field spec.training.add_tokens; did you mean spec.model.addedTokens?",
    "training: {additionalSpecialTokens: [<a>]}": "unknown field spec.training.additionalSpecialTokens; did you mean "
    "spec.model.addedSpecialTokens?",
    "lora: {use_lora: true}": "unknown field spec.lora.use_lora; did you mean spec.lora?",
    "lora: {use_rslora: true}": "unknown field spec.lora.use_rslora; did you mean spec.lora.alpha: alpha times the "
    "root of the rank?",
    "training: {push_to_hub: true}": "unknown field spec.training.push_to_hub; did you mean spec.export.hub?",
    "hub_model_id: org/mine": "unknown field spec.hub_model_id; did you mean spec.export.hub.repository?",
    "export: {export_hub_model_id: org/mine}": "unknown field spec.export.export_hub_model_id; did you mean "
    "spec.export.hub.repository?",
    "export: {hub: {repository: org/mine, repo_id: org/mine}}": "unknown field spec.export.hub.repo_id; did you mean "
    "repository?",
    "export: {hub: {repository: org/mine, branch: v2}}": "unknown field spec.export.hub.branch; did you mean revision?",
    "export: {hub: {repository: org/mine, name: mine}}": "unknown field spec.export.hub.name; did you mean repository?",
    "export: {hub: {repository: org/mine, uri: hf://org/mine}}": "unknown field spec.export.hub.uri; did you mean "
    "repository?",
    "export: {hub: {repository: org/mine, public: true}}": "unknown field spec.export.hub.public; did you mean "
    "private?",
    "export: {hub: {repository: org/mine, token: hf_x}}": "unknown field spec.export.hub.token; did you mean "
    "spec.model.tokenSecretRef?",
    "export: {repo: org/mine}": "unknown field spec.export.repo; did you mean spec.export.hub.repository?",
    "export: {name: org/mine}": "unknown field spec.export.name; did you mean spec.export.hub.repository?",
    "export: {hub: {repository: https://huggingface.co/org/mine}}": f"spec.export.hub.repository: {_REPOSITORY}, got "
    '"https://huggingface.co/org/mine"; did you mean org/mine?',
    "export: {hub: {repository: hf://org/mine@v2}}": f"spec.export.hub.repository: {_REPOSITORY}, got "
    f'"hf://org/mine@v2"; {_BRANCH}',
    "export: {hub: {repository: https://huggingface.co/org/mine/tree/main}}": f"spec.export.hub.repository: "
    f'{_REPOSITORY}, got "https://huggingface.co/org/mine/tree/main"; {_BRANCH}',
    "export: {hub: org/mine}": 'spec.export.hub: must be a map of fields, got "org/mine"; write {repository: '
    '"org/mine"}',
    "hub_strategy: end": "unknown field spec.hub_strategy; did you mean spec.export.hub?",
    "hf_use_auth_token: true": "unknown field spec.hf_use_auth_token; did you mean spec.model.tokenSecretRef?",
    "training: {hub_private_repo: true}": "unknown field spec.training.hub_private_repo; did you mean "
    "spec.export.hub.private?",
    "training: {num_train_epochs: 3}": "unknown field spec.training.num_train_epochs; did you mean "
    "spec.training.epochs?",
    "data: {train: [{uri: hf://org/rows}], max_seq_length: 512}": "unknown field spec.data.max_seq_length; did you "
    "mean spec.data.maxLength?",
    "val_set_size: 0.05": "unknown field spec.val_set_size; did you mean spec.data.heldOut.fraction?",
    "training: {save_steps: 10}": "unknown field spec.training.save_steps; did you mean spec.checkpoint.everySteps?",
    "training: {evalSteps: 10}": "unknown field spec.training.evalSteps; did you mean "
    "spec.training.evaluation.everySteps?",
    "evals_per_epoch: 4": "unknown field spec.evals_per_epoch; did you mean "
    "spec.training.evaluation.everyEpochs: 0.25?",
    "training: {pure_bf16: true}": "unknown field spec.training.pure_bf16; did you mean "
    "spec.training.parameterDtype: bf16?",
    "training: {batch_size: 8}": "unknown field spec.training.batch_size; did you mean spec.training.globalBatchSize?",
    "training: {bf16: true}": "unknown field spec.training.bf16; did you mean spec.training.precision?",
    "training: {lr_scheduler_type: linear}": "unknown field spec.training.lr_scheduler_type; did you mean "
    "spec.training.schedule.type?",
    "training: {schedule: {type: cosine_with_restarts, cycles: 2}}": f"spec.training.schedule.type: {_SCHEDULES}, got "
    '"cosine_with_restarts"; did you mean cosineWithRestarts?',
    "training: {schedule: {type: inverse_sqrt}}": f"spec.training.schedule.type: {_SCHEDULES}, got "
    '"inverse_sqrt"; did you mean inverseSqrt?',
    "training: {schedule: {num_cycles: 2}}": "unknown field spec.training.schedule.num_cycles; did you mean "
    "spec.training.schedule.cycles?",
    "neftune_noise_alpha: 5": "unknown field spec.neftune_noise_alpha; did you mean spec.training.neftuneNoiseAlpha?",
    "training: {neftune_noise_alpha: 5}": "unknown field spec.training.neftune_noise_alpha; did you mean "
    "neftuneNoiseAlpha?",
    "training: {label_smoothing_factor: 0.1}": "unknown field spec.training.label_smoothing_factor; did you mean "
    "spec.training.labelSmoothing?",
    "training: {loss_type: dft}": "unknown field spec.training.loss_type; did you mean spec.training.loss?",
    "use_dft_loss: true": "unknown field spec.use_dft_loss; did you mean spec.training.loss: dft?",
    "training: {loss: chunked_nll}": 'spec.training.loss: must be one of crossEntropy, dft, got "chunked_nll"; did you '
    "mean crossEntropy?",
    "load_in_4bit: true": "unknown field spec.load_in_4bit; did you mean spec.lora.basePrecision: nf4?",
    "qlora: {}": "unknown field spec.qlora; did you mean spec.lora.basePrecision: nf4?",
    "lora: {loadIn4bit: true}": "unknown field spec.lora.loadIn4bit; did you mean spec.lora.basePrecision: nf4?",
    "lora: {bnb_4bit_quant_type: nf4}": "unknown field spec.lora.bnb_4bit_quant_type; did you mean "
    "spec.lora.basePrecision: nf4?",
    "lora: {bnb_4bit_compute_dtype: bfloat16}": "unknown field spec.lora.bnb_4bit_compute_dtype; did you mean "
    "spec.training.precision?",
    "model: {uri: hf://org/name, load_in_8bit: true}": "unknown field spec.model.load_in_8bit; did you mean "
    "spec.lora.basePrecision?",
    "model: {uri: hf://org/name, quantization_config: {}}": "unknown field spec.model.quantization_config; did you "
    "mean spec.lora.basePrecision: nf4?",
    "adapter: qlora": "unknown field spec.adapter; did you mean spec.lora?",
    "lora_alpha: 16": "unknown field spec.lora_alpha; did you mean spec.lora.alpha?",
    "lora: {adapter_name_or_path: org/a}": "unknown field spec.lora.adapter_name_or_path; did you mean "
    "spec.lora.adapterUri?",
    "lora_model_dir: ./adapters": "unknown field spec.lora_model_dir; did you mean spec.lora.adapterUri?",
    "lora: {lora_r: 8}": "unknown field spec.lora.lora_r; did you mean spec.lora.rank?",
    "lora: {target_parameters: [experts]}": "unknown field spec.lora.target_parameters; did you mean "
    "spec.lora.targetModules?",
    "training: {optimizer: adamw_torch}": 'spec.training.optimizer: must be a map of fields, got "adamw_torch"; write '
    "{type: adamw}",
    "training: {schedule: cosine_with_restarts}": "spec.training.schedule: must be a map of fields, got "
    '"cosine_with_restarts"; write {type: cosineWithRestarts}',
    "training: {optimizer: lion}": 'spec.training.optimizer: must be a map of fields, got "lion"',
    "lora: true": "spec.lora: must be a map of fields, got true; write {} for its defaults",
    "lora: false": "spec.lora: must be a map of fields, got false; leave it out",
    "checkpoint: {resume: false}": "spec.checkpoint.resume: must be a map of fields, got false; write {policy: never}",
    "checkpoint: {resume: never}": 'spec.checkpoint.resume: must be a map of fields, got "never"; write '
    "{policy: never}",
    "checkpoint: {resume: {policy: false}}": "spec.checkpoint.resume.policy: must be one of auto, never, got false; "
    "did you mean never?",
    "export: false": "spec.export: must be a map of fields, got false; write {atEnd: false}",
    "training: {schedule: false}": "spec.training.schedule: must be a map of fields, got false",
    "lora: rank": 'spec.lora: must be a map of fields, got "rank"',
    "data: {train: [{uri: hf://org/rows}], heldOut: true}": "spec.data.heldOut: must be a map of fields, got true",
    "strategy: fsdp": 'spec.strategy: must be a map of fields, got "fsdp"; write {fsdp: {}}',
    "model: {uri: hf://org/name, tokenSecretRef: hub}": "spec.model.tokenSecretRef: must be a map of fields, got "
    '"hub"; write {name: "hub"}',
    "data: {train: [{uri: hf://org/rows}], packing: true}": "spec.data.packing: must be one of none, ffd, got true; "
    "did you mean ffd?",
    "data: {train: [{uri: hf://org/rows}], packing: off}": "spec.data.packing: must be one of none, ffd, got false; "
    "did you mean none?",
    "training: {activationCheckpointing: true}": "spec.training.activationCheckpointing: must be one of none, "
    "selective, full, got true; did you mean full?",
    "training: {precision: true}": "spec.training.precision: must be one of bf16, fp32, got true",
    "model: {uri: hf://org/name, revision: main}": "unknown field spec.model.revision; did you mean spec.model.uri: "
    "hf://org/name@revision?",
    "data: {train: [{uri: hf://org/rows, revision: main}]}": "unknown field spec.data.train[0].revision; did you mean "
    "spec.data.train[].uri: hf://org/name@revision?",
    "export: {revision: v2}": "unknown field spec.export.revision; did you mean spec.export.hub.revision?",
    "lora: {adapter: org/a}": "unknown field spec.lora.adapter; did you mean spec.lora.adapterUri?",
    "model: {uri: hf://org/name, trust_remote_code: true}": "unknown field spec.model.trust_remote_code; leave it out: "
    "no code of models is run",
    "attn_implementation: flash_attention_2": "unknown field spec.attn_implementation; leave it out: the kernel is "
    "chosen",
    "lora: {modules_to_save: [lm_head]}": "unknown field spec.lora.modules_to_save; did you mean "
    "spec.training.trainableModules?",
    "lora: {basePrecision: 4bit}": f'spec.lora.basePrecision: {_BASE_PRECISION}, got "4bit"; did you mean nf4?',
    "lora: {basePrecision: 4}": f"spec.lora.basePrecision: {_BASE_PRECISION}, got 4; did you mean nf4?",
    "lora: {basePrecision: int8}": f'spec.lora.basePrecision: {_BASE_PRECISION}, got "int8"',
    "lora: {basePrecision: float32}": f'spec.lora.basePrecision: {_BASE_PRECISION}, got "float32"; did you mean fp32?',
    "training: {precision: int4}": 'spec.training.precision: must be one of bf16, fp32, got "int4"',
    "lora: {type: lora}": "unknown field spec.lora.type",
    "model: {uri: hf://org/name, path: org/name}": "unknown field spec.model.path; did you mean uri?",
    "data: {train: [{uri: hf://org/rows, type: alpaca}]}": "unknown field spec.data.train[0].type; did you mean "
    "format?",
    "data: {train: [{uri: hf://org/rows, name: en}]}": "unknown field spec.data.train[0].name; did you mean uri or "
    "subset?",
    "data: {train: [{uri: hf://org/rows, config: en}]}": "unknown field spec.data.train[0].config; did you mean "
    "subset?",
    "data: {train: [{uri: hf://org/rows}], truncation: true}": "unknown field spec.data.truncation; did you mean "
    "spec.data.overlong?",
    "data: {train: [{uri: hf://org/rows}], max_samples: 9}": "unknown field spec.data.max_samples; did you mean "
    "spec.data.train[].split?",
    "compute: {memory: 16Gi}": "unknown field spec.compute.memory; did you mean spec.compute.resources.requests?",
    "compute: {resourcesPerNode: {}}": "unknown field spec.compute.resourcesPerNode; did you mean "
    "spec.compute.resources?",
    "compute: {runtimeRef: {name: torch}}": "unknown field spec.compute.runtimeRef; did you mean "
    "spec.compute.podProfile?",
    "compute: {profile: h100}": "unknown field spec.compute.profile; did you mean podProfile or "
    "spec.monitoring.profile?",
    "monitoring: {podProfile: h100}": "unknown field spec.monitoring.podProfile; did you mean profile or "
    "spec.compute.podProfile?",
    "compute: {nodeAffinity: {}}": "unknown field spec.compute.nodeAffinity; did you mean spec.compute.podProfile?",
    "checkpoint: {everyMinutes: 5}": "unknown field spec.checkpoint.everyMinutes; did you mean "
    "spec.checkpoint.everySeconds?",
    "model: {uri: 5}": "spec.model.uri: must be a string, got 5; put it in quotes",
    "model: {uri: hf://org/name, parameters: 8030261248}": "spec.model.parameters: must be a string, got 8030261248; "
    "write 8.0303B",
    "model: {uri: hf://org/name, parameters: 0.6}": "spec.model.parameters: must be a string, got 0.6; write 0.6B",
    "model: {uri: llama}": "spec.model.uri: must be hf://org/name[@revision], s3://bucket/prefix, pvc://claim/path or "
    'file:///absolute/path, got "llama"',
    "compute: {image: yes}": "spec.compute.image: must be a string, got true; put it in quotes",
    "compute: {labels: team}": 'spec.compute.labels: must be a map, got "team"',
    'compute: {image: ""}': "spec.compute.image: must have at least 1 character, got 0",
    "compute: {cacheSize: 5GB}": 'spec.compute.cacheSize: must be a quantity such as 2, 500m or 64Gi, got "5GB"; did '
    "you mean 5Gi or 5G?",
    "compute: {env: [{name: RANK, value: a}]}": "spec.compute.env[0].name: this environment variable is set by the "
    'supervisor and cannot be given, got "RANK"',
    'training: {steps: "100"}': 'spec.training.steps: must be a whole number, got "100"; leave the quotes out',
    "training: {steps: many}": 'spec.training.steps: must be a whole number, got "many"',
    "training: {steps: 1.5}": "spec.training.steps: must be a whole number, got 1.5",
    "training: {optimizer: {learningRate: 0}}": "spec.training.optimizer.learningRate: must be greater than 0, got 0",
    "training: {optimizer: {betas: [0.9, 1.0]}}": "spec.training.optimizer.betas[1]: must be less than 1, got 1",
    'training: {optimizer: {learningRate: "1e-5"}}': "spec.training.optimizer.learningRate: must be a number, got "
    '"1e-5"; leave the quotes out',
    "training: {seed: 99999999999}": "spec.training.seed: must be at most 4294967295, got 99999999999",
    "suspend: 'yes'": 'spec.suspend: must be true or false, got "yes"; leave the quotes out',
}


@pytest.mark.parametrize(("spec", "sentence"), SENTENCES.items(), ids=lambda text: text[:50])
def test_every_fault_is_one_sentence_with_path_and_value(spec: str, sentence: str) -> None:
    assert problems(job(spec)) == [sentence]


def test_all_faults_are_said_in_the_order_of_the_fields() -> None:
    text = job("training: {steps: 1, epochs: 1, globalBatchSize: 1, globalBatchTokens: 1}") + "  suspend: 1\n"

    assert problems(text) == [
        "spec.training: give training.steps or training.epochs, not both; given: training.steps 1, training.epochs 1",
        "spec.training: give training.globalBatchSize or training.globalBatchTokens, not both; given: "
        "training.globalBatchSize 1, training.globalBatchTokens 1",
        "spec.suspend: must be true or false, got 1",
    ]


def test_faults_of_the_metadata() -> None:
    assert problems(MINIMAL.replace("name: job", "name: Job")) == [
        "metadata.name must be at most 50 lower-case letters, digits and -, starting with a letter: it names a "
        'Service and the pods; given: metadata.name "Job"'
    ]
    assert problems(MINIMAL.replace("{name: job}", "{name: job, lables: {}}")) == [
        "unknown field metadata.lables; did you mean labels?"
    ]


def test_a_manifest_for_kubectl_create_is_valid_and_is_no_run_of_this_machine() -> None:
    text = MINIMAL.replace("{name: job}", "{generateName: job-}")

    # Two of them are two jobs, and with a name the begin of another one counts for nothing
    assert [job.metadata.name for job in load_manifests(f"{text}---\n{text}")] == ["job-xxxxx", "job-xxxxx"]
    assert load_manifests(text.replace("job-}", "job-, name: this}"))[0].metadata.name == "this"
    assert load_overridden(text, None, [], generated_names=True)[0].metadata.name == "job-xxxxx"
    with pytest.raises(ManifestError, match=r"give each a metadata\.name, and choose one with --job$"):
        load_overridden(f"{text}---\n{text}", "job-xxxxx", [], generated_names=True)
    # The letters count
    assert problems(text.replace("job-", "j" * 46))[0].endswith(f'metadata.name "{"j" * 46}xxxxx"')

    with pytest.raises(ManifestError, match=r"^metadata\.name: is required: of metadata\.generateName the API server"):
        load_manifest(text)
    # sft checkpoints takes no --set
    with pytest.raises(ManifestError, match=r"give it there \(to sft run and sft export also as --set"):
        load_manifest(text)
    named = [read_override("metadata.name=mine")]
    assert load_overridden(text, None, named)[0].metadata.name == "mine"
    with pytest.raises(ManifestError, match=r"^metadata\.name: is required$"):
        load_manifest(text.replace("job-", "''"))


def test_a_rule_on_fields_far_apart_says_what_the_manifest_gives_them() -> None:
    text = job("training: {globalBatchSize: 10, microBatchSize: 4}").replace("compute: {}", "compute: {nodes: 3}")

    said = problems(text.replace("rows}]}", "rows}], packing: none}"))

    for problem, given in zip(said, ["", ", training.microBatchSize 4"], strict=True):
        assert problem.startswith("spec: training.globalBatchSize must be divisible by the number of processes")
        assert problem.endswith(f"; given: training.globalBatchSize 10{given}, compute.nodes 3")
    assert problems(job("checkpoint: {keep: {best: 1}}"))[0].endswith("evaluation loss; given: checkpoint.keep.best 1")


def test_a_rule_of_a_block_says_what_that_gives_its_fields() -> None:
    """Sentences name them from the block on, or from one around it."""
    for block, given in {
        "training: {optimizer: {momentum: 0.9}}": "optimizer.momentum 0.9",
        "training: {optimizer: {type: muon, stateDtype: int8}}": 'optimizer.stateDtype "int8"',
        "strategy: {fsdp: {reduceGradients: oncePerStep, reduceDtype: bf16}}": "strategy.fsdp.reduceGradients "
        '"oncePerStep", strategy.fsdp.reduceDtype "bf16"',
        "training: {evaluation: {everySteps: 2, everyEpochs: 1}}": "training.evaluation.everySteps 2, "
        "training.evaluation.everyEpochs 1",
    }.items():
        assert problems(job(block))[0].endswith(f"; given: {given}")


def test_a_block_that_lost_its_indentation_is_one_of_the_spec() -> None:
    """``data`` looks like ``metadata``, which stands beside it where all blocks were put at the margin."""
    text = MINIMAL.replace("  model:", "model:").replace("  data:", "data:").replace("  compute:", "compute:")

    assert problems(text) == [
        "spec: is required",
        "unknown field model; did you mean spec.model?",
        "unknown field data; did you mean spec.data?",
        "unknown field compute; did you mean spec.compute?",
    ]


def test_long_values_are_cut() -> None:
    (problem,) = problems(job(f"model: {{uri: {'a' * 500}}}"))

    assert problem.endswith("aaa…")
    assert len(problem) < 250


def test_paths_are_written_as_kubernetes_does() -> None:
    assert field_path(("spec", "data", "train", 0, "uri")) == "spec.data.train[0].uri"
    assert field_path(()) == ""


TWO = f"{MINIMAL}---\n{MINIMAL.replace('name: job', 'name: other')}"


def test_one_of_several_jobs_can_be_named() -> None:
    assert load_manifest(TWO, "other").metadata.name == "other"
    with pytest.raises(ManifestError, match="holds no SFTJob third, found job, other"):
        load_manifest(TWO, "third")


def test_two_jobs_of_one_name_would_replace_each_other() -> None:
    assert problems(f"{MINIMAL}---\n{MINIMAL}") == [
        "2 SFTJobs are called job: only the last would remain; give each a metadata.name"
    ]
    elsewhere = MINIMAL.replace("{name: job}", "{name: job, namespace: elsewhere}")
    assert len(load_manifests(f"{MINIMAL}---\n{elsewhere}")) == 2


def test_a_folder_is_all_of_its_manifests(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(MINIMAL.replace("name: job", "name: b"))
    (tmp_path / "a.yml").write_text(f"{SECRET}---\n{MINIMAL.replace('name: job', 'name: a')}")
    (tmp_path / "values.yaml").write_text("replicas: 2\n")
    (tmp_path / "rows.json").write_text('[{"n": 1}]')
    (tmp_path / "notes.txt").write_text("no manifest")

    assert [found.metadata.name for found in load_manifests(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize("kind", ["", "kind: Job\n"])
def test_a_document_of_our_api_is_never_passed_over(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.yaml").write_text(MINIMAL)
    (tmp_path / "b.yaml").write_text(MINIMAL.replace("kind: SFTJob\n", kind))
    with pytest.raises(ManifestError) as caught:
        load_manifests(tmp_path)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{tmp_path}/b.yaml: kind: ")


def test_every_field_that_is_suggested_exists() -> None:
    known = set(field_paths(structural_schema(SFTJob)["properties"]["spec"], "spec"))

    assert {f"spec.{path.partition(':')[0]}" for path in _OTHER_NAMES.values()} <= known


def test_a_folder_names_the_file_of_every_problem(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(MINIMAL)
    (tmp_path / "b.yaml").write_text(job("training: {steps: 0}"))
    with pytest.raises(ManifestError) as caught:
        load_manifests(tmp_path)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{tmp_path}/b.yaml: spec.training.steps: must be at least 1, got 0")

    (tmp_path / "b.yaml").write_text("{")
    with pytest.raises(ManifestError, match=f"{tmp_path}/b.yaml is not a YAML file"):
        load_manifests(tmp_path)


def test_a_folder_without_manifests_says_so(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=f"{tmp_path} holds no file that ends with .json, .yaml, .yml"):
        load_manifests(tmp_path)
    (tmp_path / "values.yaml").write_text("replicas: 2\n")
    with pytest.raises(ManifestError, match=f"{tmp_path} holds no SFTJob"):
        load_manifests(tmp_path)
