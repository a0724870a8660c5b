"""FlashAttention 4 is used where it is there and right, and torch's kernel only where that is right."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import library

from sft_api.v1alpha1.compute import EnvVar
from sft_trainer import trainer
from sft_trainer.errors import ConfigError, DeviceUnavailableError
from sft_trainer.models import attention, attention_choice, flash_attention
from sft_trainer.models.attention import Boundaries, boundary_arguments, document_attention
from sft_trainer.models.attention_choice import VARIABLE, choose_attention, error_of
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.explicit_attention import _forward, _gradients, attend_explicitly
from sft_trainer.models.flash_attention import Kind, flash_gradients_operator, flash_operator
from sft_trainer.models.probe import attention_of
from sft_trainer.preparation import prepare_model
from sft_trainer.reporting import Reporter
from sft_trainer.topology import Topology
from sft_trainer.trainer import Trainer
from sft_trainer.versions import attention_kernels, find_flash_attention_4, hide_flash_attention_4
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.test_models import save_config, save_model

CPU = torch.device("cpu")
PLAIN = Kind(2, 16, 16, windowed=False, cap=None, sinks=False)
EVERYTHING = Kind(2, 16, 16, windowed=True, cap=20.0, sinks=True)


class Package:
    """In the place of flash-attn-4: attention by its definition, or something beside it."""

    def __init__(self) -> None:
        self.calls = 0
        self.spoiled: Callable[[Kind], str] = lambda kind: ""
        """What of a kind is computed wrongly."""

    def forward(self, query: Any, key: Any, value: Any, sinks: Any, ends: Any, longest: int, *options: Any) -> None:
        scale, window, cap, output, logarithms = options
        self.calls += 1
        assert longest >= int(ends.diff().max())
        by_heads = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
        spoiled = self.spoiled(flash_attention.kind_of(*by_heads, window, cap, sinks))
        if spoiled == "raises":
            raise RuntimeError("no such kernel")
        computed, logs = _forward(*by_heads, sinks, ends, scale, window, cap)
        output.copy_(computed[0] * (1.1 if spoiled == "output" else 1))
        logarithms.copy_(logs[0])

    def backward(
        self, gradient: Any, query: Any, key: Any, value: Any, sinks: Any, output: Any, logarithms: Any, *options: Any
    ) -> Any:
        ends, _longest, scale, window, cap, made = options
        by_heads = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
        spoiled = self.spoiled(flash_attention.kind_of(*by_heads, window, cap, sinks))
        computed = _gradients(
            gradient[None], *by_heads, sinks, output[None], logarithms[None], ends, scale, window, cap
        )
        for name, into, from_ in zip(("query", "key", "value"), made, computed[:3], strict=True):
            into.copy_(from_[0].transpose(0, 1) * (torch.nan if spoiled == name else 1))
        return computed[3] if sinks is not None else None


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """It is there, and the CPU is a GPU that it is made for; without it torch's kernel of the CPU is used."""
    package = Package()
    monkeypatch.setattr(flash_attention, "flash_attention_4", package.forward)
    monkeypatch.setattr(flash_attention, "flash_attention_4_backward", package.backward)
    monkeypatch.setattr(flash_attention, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(attention_choice, "find_flash_attention_4", lambda: True)
    monkeypatch.setattr(attention_choice, "is_made_for", lambda device: True)
    # As long as they are, what they are there for are blocks of kernels.
    monkeypatch.setattr(attention_choice, "LAYOUTS", ((30, 1, 13), (30, 1, 13, 2, 2)))
    monkeypatch.setattr(attention_choice, "_WINDOW", 15)
    monkeypatch.delenv(VARIABLE, raising=False)
    yield package
    flash_attention.use(())


def chosen(tmp_path: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    save_config(kind, tmp_path, **options)
    return choose_attention(build_on_meta(tmp_path).huggingface, CPU, dtype)


def inputs_of(kind: Kind, lengths: tuple[int, ...]) -> tuple[list[Any], torch.Tensor]:
    """Query, key, value, sinks or None, as projections lay them out; and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, sum(lengths), heads, kind.size) for heads in (2 * kind.sharing, 2, 2, 2 * kind.sharing)]
    drawn = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    sinks = torch.randn(2 * kind.sharing, generator=generator).bfloat16().requires_grad_() if kind.sinks else None
    return [*(tensor.transpose(1, 2).requires_grad_() for tensor in drawn[:3]), sinks], drawn[3]


@pytest.mark.parametrize("kind", [PLAIN, EVERYTHING])
def test_what_goes_by_the_package_is_attention(package: Package, kind: Kind) -> None:
    lengths = (5, 1, 23)
    (query, key, value, sinks), upstream = inputs_of(kind, lengths)
    given = {"sliding_window": 6 if kind.windowed else None, "softcap": kind.cap, "s_aux": sinks, "scaling": 0.3}
    leaves = [query, key, value, *([sinks] if kind.sinks else [])]

    def run() -> list[torch.Tensor]:
        module = attention_choice.CAUSAL
        output, _ = document_attention(
            module, query, key, value, None, **given, **boundary_arguments(Boundaries.of(lengths))
        )
        return [output, *torch.autograd.grad(output, leaves, upstream)]

    # Given what is computed without it, when its kind is used, then the same comes of it
    expected = run()
    assert package.calls == 0
    flash_attention.use([kind])
    seen = run()
    assert package.calls == 1
    for one, other in zip(seen, expected, strict=True):
        assert one.shape == other.shape
        assert (one.float() - other.float()).norm() < 2e-2 * other.float().norm()

    # And another kind, another dtype and dropout go on without it
    flash_attention.use([kind._replace(size=8)])
    run()
    flash_attention.use([kind])
    query = query.detach().float()
    key, value = key.detach().float(), value.detach().float()
    sinks = None if sinks is None else sinks.detach().float()
    given["s_aux"] = sinks
    document_attention(
        attention_choice.CAUSAL, query, key, value, None, **given, **boundary_arguments(Boundaries.of(lengths))
    )
    assert package.calls == 1


@pytest.mark.parametrize("kind", [PLAIN, EVERYTHING])
@pytest.mark.usefixtures("package")
def test_a_compiler_is_told_the_shapes_strides_and_gradients_that_there_are(kind: Kind) -> None:
    (query, key, value, sinks), upstream = inputs_of(kind, (5, 1, 23))
    three = [tensor.detach()[0].transpose(0, 1).requires_grad_() for tensor in (query, key, value)]
    ends = Boundaries.of((5, 1, 23)).ends
    options = (ends, 256, 0.3, 6 if kind.windowed else None, kind.cap)
    library.opcheck(flash_operator, (*three, sinks, *options))
    output, logarithms = flash_operator(*three, sinks, *options)
    plain = [None if tensor is None else tensor.detach() for tensor in (upstream[0], *three, sinks, output, logarithms)]
    library.opcheck(flash_gradients_operator, (*plain, *options))


def test_recomputation_keeps_its_output() -> None:
    assert torch.ops.sft.flash_attention.default in attention_kernels()


@pytest.mark.parametrize("kind", [PLAIN, EVERYTHING])
@pytest.mark.usefixtures("package")
def test_a_step_is_compiled_around_it(kind: Kind) -> None:
    # Given a compiler that shows what it is given, and a kind that is used
    torch.compiler.reset()
    graphs = []

    def show(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return lambda *inputs: (next(each for each in inputs if getattr(each, "ndim", 0) == 4).transpose(1, 2),)

    flash_attention.use([kind])
    (query, key, value, sinks), _ = inputs_of(kind, (4, 5))
    given = {"sliding_window": 6 if kind.windowed else None, "softcap": kind.cap, "s_aux": sinks}

    def attend(**boundaries: Any) -> torch.Tensor:
        return document_attention(attention_choice.CAUSAL, query, key, value, None, **given, **boundaries)[0]

    # When it is compiled as a whole, then it is one operator, and after two bounds of lengths one of any
    compiled = torch.compile(attend, fullgraph=True, backend=show)
    for longest in (9, 300, 600, 5000):
        compiled(**boundary_arguments(Boundaries.of((4, 5))) | {"max_length_q": longest})
    assert len(graphs) == 2
    assert [node for node in graphs[0].graph.nodes if "flash_attention" in str(node.target)]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (
            "llama",
            {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
            "heads of 16, 2 for each of keys",
        ),
        ("gpt_oss", {}, "with a window and sinks; heads of "),
        ("gemma2", {}, "with a window and scores capped at 50.0; heads of "),
    ],
)
def test_every_kind_of_a_model_that_it_computes_rightly_goes_by_it(
    package: Package, tmp_path: Path, kind: str, options: dict[str, Any], words: str
) -> None:
    told = chosen(tmp_path, kind, **options)
    assert words in told.used
    assert not told.not_used
    assert {*flash_attention._USED} == attention_of(build_on_meta(tmp_path).huggingface)
    assert package.calls == len(attention_choice.LAYOUTS) * len(flash_attention._USED)


@pytest.mark.parametrize("what", ["output", "query", "key", "value", "raises"])
def test_a_kind_that_it_computes_wrongly_does_not(package: Package, tmp_path: Path, what: str) -> None:
    # Given a package that is wrong with windows alone
    package.spoiled = lambda kind: what if kind.windowed else ""
    told = chosen(tmp_path, "gpt_oss")

    # Then layers without go by it, and the others are told
    assert [kind.windowed for kind in flash_attention._USED] == [False]
    assert "window" not in told.used
    reason = "RuntimeError: no such kernel" if what == "raises" else "output or gradients are off by "
    assert "with a window and sinks (" + reason in told.not_used


def test_a_kernel_that_breaks_the_device_is_said_with_what_leaves_it_out(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a kernel after whose error nothing runs in the process any more
    package.spoiled = lambda kind: "raises"
    monkeypatch.setattr(attention_choice, "_works", lambda device: False)

    # Then the driver is not all that is blamed
    with pytest.raises(DeviceUnavailableError, match=r"FlashAttention 4 was tried .*no such kernel.*value: \"off"):
        chosen(tmp_path)


@pytest.mark.parametrize("there", [False, True])
def test_a_gpu_that_is_full_says_nothing_of_its_kernels(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    # Given a process of before that still holds the memory: without its own kernels the whole run would be slow
    monkeypatch.setattr(attention_choice, "error_of", Mock(side_effect=torch.OutOfMemoryError("tried 2 MiB")))
    monkeypatch.setattr(attention_choice, "find_flash_attention_4", lambda: there)
    with pytest.raises(DeviceUnavailableError, match=r"another process uses it \(tried 2 MiB\)"):
        chosen(tmp_path)


@pytest.mark.parametrize("why", ["switched off", "another GPU", "not installed", "fp32", "a CPU"])
def test_it_is_not_asked_where_it_is_not_to_be_used(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    flash_attention.use([PLAIN])  # of an earlier run in this process
    if why == "switched off":
        monkeypatch.setenv(VARIABLE, "off")
    elif why == "another GPU":
        monkeypatch.setattr(attention_choice, "is_made_for", lambda device: False)
    elif why == "not installed":
        monkeypatch.setattr(attention_choice, "find_flash_attention_4", lambda: False)
    elif why == "a CPU":
        monkeypatch.setattr(flash_attention, "DEVICE_TYPE", "cuda")
    assert chosen(tmp_path, dtype=torch.float32 if why == "fp32" else torch.bfloat16) == ("", "")
    assert package.calls == 0
    assert not flash_attention._USED


def test_a_job_can_switch_it_off_as_the_docs_say() -> None:
    # Names of the trainer's own variables are refused in ``compute.env``.
    given = EnvVar(name=VARIABLE, value="off")
    docs = Path(__file__).parents[3] / "docs" / "training-speed.md"
    assert f'`{{name: {given.name}, value: "{given.value}"}}` in `compute.env`' in docs.read_text(encoding="utf-8")


@pytest.mark.parametrize("there", [False, True])
def test_torchs_own_kernel_is_not_used_where_it_is_wrong(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    # Given a kernel of torch whose gradients are wrong, as cuDNN's were with torch 2.11
    monkeypatch.setattr(
        attention,
        "attend",
        lambda q, k, v, *rest: attend_explicitly(q, k, v.detach() + 0 * v, None, rest[0], *rest[1:], None),
    )
    monkeypatch.setattr(attention_choice, "find_flash_attention_4", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")

    # When nothing else computes it, then the run is refused before it costs more; else it is not needed
    if there:
        assert chosen(tmp_path).used
    else:
        with pytest.raises(ConfigError, match=r"computes attention on a GPU wrongly \(heads of .* another PyTorch"):
            chosen(tmp_path)


def test_what_is_used_is_said(package: Package, tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    config = resolve(manifest(tmp_path, tmp_path / "store", training={"precision": "bf16"}))
    said, warned = [], []
    reporter = Reporter(tmp_path, writes=False)
    reporter.say = lambda text, *values: said.append(text % values)  # type: ignore[method-assign]
    reporter.warn = warned.append  # type: ignore[assignment, method-assign]
    prepare_model(config, reporter, CPU)
    assert any(text.startswith("FlashAttention 4 computes heads of ") for text in said)

    package.spoiled = lambda kind: "key"
    prepare_model(config, reporter, CPU)
    assert any(text.startswith("FlashAttention 4 is not used for heads of ") for text in warned)


def test_other_kernels_than_those_of_the_first_process_are_told(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two processes, of which the second one found it wrong: what only that one says reaches nobody
    run = SimpleNamespace(device=CPU, topology=Topology(rank=0, local_rank=0, world_size=2, shard=2), reporter=Mock())
    run._others = lambda what: nullcontext()
    run.prepared = SimpleNamespace(model=SimpleNamespace(attention=chosen(tmp_path)))
    package.spoiled = lambda kind: "key"
    second = chosen(tmp_path)
    monkeypatch.setattr(trainer, "gathered", lambda here: [here, second])

    # When they are compared, then the first one tells; and nothing where both have the same
    Trainer._tell_attention(run)  # type: ignore[arg-type]
    (said,) = run.reporter.warn.call_args.args
    assert "process 1 of 2 has other kernels" in said
    assert "FlashAttention 4 computes nothing, and is not used for heads of " in said
    assert "off by nan of their length" in said
    run.reporter.warn.reset_mock()
    monkeypatch.setattr(trainer, "gathered", lambda here: [here, here])
    Trainer._tell_attention(run)  # type: ignore[arg-type]
    run.reporter.warn.assert_not_called()


@pytest.mark.usefixtures("package")
def test_heads_are_compared_as_processes_that_share_tokens_have_them(tmp_path: Path) -> None:
    # Given four heads, two for each of keys, of which every process gets one of each
    save_model("llama", tmp_path / "model")
    sharing = {"processes": 4, "strategy": {"fsdp": {"sequenceParallelDegree": 4}}}
    config = resolve(manifest(tmp_path, tmp_path / "store", training={"precision": "bf16"}, **sharing))
    prepare_model(config, Reporter(tmp_path, writes=False), CPU)
    assert {kind.sharing for kind in flash_attention._USED} == {1}


def test_errors_are_those_of_the_kernel_that_is_asked(package: Package) -> None:
    assert error_of(EVERYTHING, CPU, by_flash=True) < 1e-2
    package.spoiled = lambda kind: "output"
    assert error_of(EVERYTHING, CPU, by_flash=True) == pytest.approx(0.12, abs=0.03)
    assert error_of(EVERYTHING, CPU, by_flash=False) < 1e-2


def test_transformers_does_not_find_it_before_it_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given the package, and a process that imported the trainer's models alone
    assert importlib.util.find_spec("flash_attn") is not None or sys.modules["flash_attn"] is None
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    hide_flash_attention_4()
    assert importlib.util.find_spec("flash_attn") is None

    # When it is looked for, then it can be found from then on; and what was imported is not hidden
    assert find_flash_attention_4()
    assert importlib.util.find_spec("flash_attn") is not None
    module = type(sys)("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    hide_flash_attention_4()
    assert sys.modules["flash_attn"] is module
