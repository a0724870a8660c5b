"""What is found out about a model and a device before the data is read, and the kernels that attention chooses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from sft_api.v1alpha1.model_config import ConfigOverrides
from sft_trainer.errors import ConfigError, DeviceUnavailableError, ModelError
from sft_trainer.models import attention
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.probe import check_trains_on
from sft_trainer.preparation import prepare
from sft_trainer.reporting import Reporter
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.published_configs import PUBLISHED
from tests.unit.trainer.test_models import save_config, save_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), PUBLISHED, ids=[kind for kind, _ in PUBLISHED])
def test_models_as_they_are_published_train_here(
    tmp_path: Path, kind: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    save_config(kind, tmp_path, **options)
    model = build_on_meta(tmp_path).huggingface
    before = torch.get_rng_state()
    check_trains_on(model, CPU, dtype)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("words", "error", "sentence"),
    [
        (
            "FlashAttention only support fp16 and bf16 data type",
            ConfigError,
            r"'llama' with heads of 8 cannot be trained in fp32 on the CPU .*: set training\.precision: bf16",
        ),
        ("CUDA error: no kernel image is available for execution", ConfigError, "or use another kind of GPU"),
        ("CUDA error: uncorrectable ECC error encountered", DeviceUnavailableError, "driver says of it .*ECC"),
    ],
)
def test_what_no_kernel_computes_is_said_before_the_data_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, error: type[Exception], sentence: str
) -> None:
    # Given a kernel whose backward fails, and data that is not there
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor) -> torch.Tensor:
            return query.transpose(1, 2).clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            raise RuntimeError(words)

    monkeypatch.setattr(attention, "attend", lambda query, *_: Kernel.apply(query))
    monkeypatch.setattr("sft_trainer.models.causal_lm.check_documents_stay_apart", lambda model: None)
    save_model("llama", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    config = resolve(manifest(tmp_path, tmp_path / "store"))

    # When a run is prepared, then the device is the first thing that is said
    with pytest.raises(error, match=sentence):
        prepare(config, Reporter(tmp_path, writes=False), CPU)


@pytest.mark.parametrize(
    ("kind", "field"), [("llama", "attention_dropout"), ("biogpt", "attention_probs_dropout_prob")]
)
def test_dropout_that_a_kernel_does_not_know_is_refused_before_the_data_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, field: str
) -> None:
    # Given the kernel of the GPU, and a model that drops
    monkeypatch.setattr(attention, "_per_document", lambda q, k, v, _, *rest: attention._varlen(q, k, v, *rest, {}))
    monkeypatch.setattr("sft_trainer.models.causal_lm.check_documents_stay_apart", lambda model: None)
    save_config(kind, tmp_path, **{field: 0.1})
    told = r"not supported on the GPU: set model\.configOverrides\.attention_dropout: 0 \(attention_probs_dropout_prob "
    with pytest.raises(ModelError, match=told):
        check_trains_on(build_on_meta(tmp_path).huggingface, CPU, torch.bfloat16)

    # And what the sentence names can be set
    without = ConfigOverrides.model_validate({field: 0.0})
    check_trains_on(build_on_meta(tmp_path, without).huggingface, CPU, torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "dtype", "path"),
    [
        ("cuda", torch.bfloat16, "_varlen"),
        ("cuda", torch.float16, "_varlen"),
        ("cuda", torch.float32, "_per_document"),
        ("cpu", torch.bfloat16, "attend"),
        ("cpu", torch.float32, "attend"),
    ],
)
def test_a_kernel_is_chosen_that_knows_the_dtype(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, path: str
) -> None:
    called = []
    for name in ("_varlen", "_per_document", "attend"):
        monkeypatch.setattr(attention, name, lambda *_, name=name: called.append(name))
    with FakeTensorMode():
        q = torch.empty(1, 4, 6, 8, dtype=dtype, device=device)
    attention.document_attention(torch.nn.Identity(), q, q, q, None, document_ends=torch.tensor([0, 2, 6]))
    assert called == [path]


def test_heads_that_are_repeated_give_what_groups_give() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, 9, 8, generator=generator)
    k, v = torch.randn(2, 1, 2, 9, 8, generator=generator)
    grouped = attention._per_document(q, k, v, [4, 5], 0.0, None, None)
    repeated = attention._per_document(q, attention._repeated(k, q), attention._repeated(v, q), [4, 5], 0.0, None, None)
    torch.testing.assert_close(repeated, grouped)


@pytest.mark.parametrize("knows_groups", [False, True])
def test_a_kernel_takes_fewer_heads_of_keys_whether_or_not_it_has_an_argument_for_that(
    monkeypatch: pytest.MonkeyPatch, knows_groups: bool
) -> None:
    # Given the kernel's interface as it is now, and as it was in torch 2.11, which looked at no numbers of heads
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, **options)[0].transpose(0, 1)

    def new(
        q: Any,
        k: Any,
        v: Any,
        a: Any,
        b: Any,
        c: Any,
        d: Any,
        *,
        scale: Any,
        window_size: Any,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        return attend(q, k, v, scale=scale, enable_gqa=enable_gqa)

    def old(q: Any, k: Any, v: Any, a: Any, b: Any, c: Any, d: Any, *, scale: Any, window_size: Any) -> torch.Tensor:
        return attend(q, k, v, scale=scale, enable_gqa=True)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", new if knows_groups else old)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, 9, 8, generator=generator)
    k, v = torch.randn(2, 1, 2, 9, 8, generator=generator)
    ends = attention.boundary_arguments(attention.Boundaries.of((9,)))

    # When documents go through it
    output = attention._varlen(q, k, v, 0.0, None, None, ends)

    # Then heads of queries find their keys
    torch.testing.assert_close(output, attention._per_document(q, k, v, [9], 0.0, None, None))


@pytest.mark.parametrize("size", [8, 5])
def test_a_kernel_for_heads_of_one_size_takes_values_that_are_smaller(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    # Given the kernel of a GPU, which has no size of the values alone
    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    monkeypatch.setattr(attention, "variable_length_attention", kernel)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, heads, 9, each, generator=generator).requires_grad_()
        for heads, each in ((6, 8), (2, 8), (2, size))
    ]
    ends = attention.boundary_arguments(attention.Boundaries.of((9,)))

    # When it computes attention with such values, then output and gradients are those of the definition
    output = attention._varlen(*inputs, 0.0, None, None, ends)
    expected = attention._per_document(*inputs, [9], 0.0, None, None)
    torch.testing.assert_close(output, expected)
    upstream = torch.randn(expected.shape, generator=generator)
    torch.testing.assert_close(*(torch.autograd.grad(each, inputs, upstream) for each in (output, expected)))
