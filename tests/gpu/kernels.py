"""Checks of single parts on the device, each against the same computation in double precision."""

import importlib.util
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from .figures import Figure
from .isolated import Skipped

Device = torch.device

# Documents of one token, of odd lengths, and longer than the sliding window.
_DOCUMENTS = (1, 17, 128, 301, 65)
_WINDOW = 64
_RECORDING_SECONDS = 30.0


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Distance relative to the length of what is expected; NaN where anything is not finite."""
    difference = actual.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def require(name: str, value: float, limit: float) -> None:
    """Raise unless ``value`` is at most ``limit``; NaN never is."""
    if not value <= limit:
        raise AssertionError(f"{name} is {value:.3g}, more than {limit:g}")


def device_facts(device: Device) -> dict[str, Figure]:
    """What this machine is, and how fast it multiplies and copies: the ceilings of what follows."""
    import transformers

    facts: dict[str, Figure] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if device.type == "cpu":
        return facts | {"device": "cpu", "threads": torch.get_num_threads()}
    from sft_trainer.flops import peak_flops

    properties = torch.cuda.get_device_properties(device)
    facts |= {
        "device": torch.cuda.get_device_name(device),
        "device_memory_gib": properties.total_memory / 2**30,
        "cuda": str(torch.version.cuda),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
    }
    facts |= {"matmul_bf16_tflops": _matmul_flops(device) / 1e12, "copy_gb_per_second": _copy_bytes(device) / 1e9}
    peak = peak_flops(device)
    if peak is None:
        raise AssertionError(f"the table of peak FLOPs does not know {facts['device']}: add it to flops.py")
    return facts | {"peak_bf16_tflops": peak / 1e12}


def seconds_of(device: Device, repeats: int, work: Any) -> float:
    """Seconds of one ``work()``, the mean of ``repeats`` after a warm-up."""
    for _ in range(3):
        work()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / repeats


def _matmul_flops(device: Device, size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(device, 20, lambda: a @ b)


def _copy_bytes(device: Device) -> float:
    source = torch.randn(2**29, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(device, 20, lambda: target.copy_(source))


def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of every document by its definition; (1, heads, tokens, size) to (1, tokens, heads, size)."""
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for q, k, v in zip(*(tensor.split(_DOCUMENTS, dim=2) for tensor in (query, key, value)), strict=True):
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        positions = torch.arange(q.shape[2], device=q.device)
        distance = positions[:, None] - positions[None, :]
        seen = (distance >= 0) & (distance < (window or q.shape[2]))
        scores = q @ k.transpose(-1, -2) * scale
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
        outputs.append(scores.softmax(-1)[..., : q.shape[2]] @ v)
    return torch.cat(outputs, dim=2).transpose(1, 2)


class _Causal(torch.nn.Module):
    is_causal = True


def attention(device: Device) -> dict[str, Figure]:
    """The registered attention, output and gradients, in the precision of training and in fp32, against double.

    Heads that share keys, a sliding window, the head sizes of the models that we name.
    """
    from sft_trainer.models.attention import Boundaries, boundary_arguments, document_attention

    figures: dict[str, Figure] = {}
    # On the CPU bf16 has the path of fp32; on a GPU it has the kernel of variable lengths.
    for dtype, name, limit in ((torch.bfloat16, "bf16", 2e-2), (torch.float32, "fp32", 1e-4)):
        worst_output = worst_gradient = 0.0
        for heads, shared, size, window in ((4, 4, 64, None), (8, 2, 128, None), (4, 2, 64, _WINDOW), (2, 1, 128, 1)):
            generator = torch.Generator().manual_seed(heads * size)
            tokens = sum(_DOCUMENTS)
            drawn = [
                torch.randn(1, count, tokens, size, generator=generator).to(device, dtype)
                for count in (heads, shared, shared)
            ]
            query, key, value = ours = [tensor.clone().requires_grad_() for tensor in drawn]
            right = [tensor.double().requires_grad_() for tensor in drawn]
            upstream = torch.randn(1, tokens, heads, size, generator=generator).to(device, dtype)
            scale = size**-0.5
            output, _ = document_attention(
                _Causal(),
                query,
                key,
                value,
                None,
                scaling=scale,
                sliding_window=window,
                **boundary_arguments(Boundaries.of(_DOCUMENTS).to(torch.device(device))),
            )
            expected = _attended(right[0], right[1], right[2], scale, window)
            output.backward(upstream)
            expected.backward(upstream.double())
            case = f"{name}, {heads} heads, {shared} of keys, size {size}, window {window}"
            error = error_of(output.detach(), expected.detach())
            require(f"attention ({case}): error of the output", error, limit)
            worst_output = max(worst_output, error)
            for what, one, other in zip(("queries", "keys", "values"), ours, right, strict=True):
                assert one.grad is not None
                assert other.grad is not None
                # With a window of one token nothing depends on queries and keys: their gradients are 0.
                length = (upstream.double() if window == 1 else other.grad).norm()
                error = float((one.grad.double() - other.grad).norm() / length)
                require(f"attention ({case}): error of the gradient of the {what}", error, limit)
                worst_gradient = max(worst_gradient, error)
        figures |= {f"attention_{name}_output_error": worst_output, f"attention_{name}_gradient_error": worst_gradient}
    return figures


def explicit_attention(device: Device) -> dict[str, Figure]:
    """Capped scores, and sinks, as the registered attention computes them: output and gradients against double."""
    from sft_trainer.models.attention import Boundaries, boundary_arguments, document_attention

    worst = 0.0
    for cap, with_sinks, window in ((20.0, False, None), (20.0, False, _WINDOW), (None, True, None), (None, True, 1)):
        generator = torch.Generator().manual_seed(0)
        tokens, heads, shared, size = sum(_DOCUMENTS), 8, 2, 64
        shapes = [(1, count, tokens, size) for count in (heads, shared, shared)]
        drawn = [torch.randn(shape, generator=generator) for shape in (*shapes, *([(heads,)] if with_sinks else []))]
        ours = [tensor.to(device, torch.bfloat16).requires_grad_() for tensor in drawn]
        right = [tensor.detach().double().requires_grad_() for tensor in ours]
        upstream = torch.randn(1, tokens, heads, size, generator=generator).to(device, torch.bfloat16)
        scale = size**-0.5
        output, _ = document_attention(
            _Causal(),
            ours[0],
            ours[1],
            ours[2],
            None,
            scaling=scale,
            sliding_window=window,
            softcap=cap,
            s_aux=ours[3] if with_sinks else None,
            **boundary_arguments(Boundaries.of(_DOCUMENTS).to(torch.device(device))),
        )
        sinks = right[3] if with_sinks else None
        expected = _attended(right[0], right[1], right[2], scale, window, cap, sinks)
        found = [output, *torch.autograd.grad(output, ours, upstream)]
        wanted = [expected, *torch.autograd.grad(expected, right, upstream.double())]
        for one, other in zip(found, wanted, strict=True):
            error = error_of(one.detach(), other.detach())
            require(f"attention with cap {cap}, window {window}: error", error, 2e-2)
            worst = max(worst, error)
    return {"attention_explicit_error": worst}


def loss(device: Device) -> dict[str, Figure]:
    """The loss that keeps no logits, its value and gradients, against cross-entropy in double precision: as it is, and
    with the part of it that is compiled."""
    from torch.nn.functional import cross_entropy

    from sft_trainer.loss import CHUNK_ELEMENTS, linear_cross_entropy
    from sft_trainer.models.compiling import compiled_slopes

    width = 64
    vocabulary = 151_936 if device.type == "cuda" else 40_000
    # Enough rows for more than one chunk on a GPU.
    rows = CHUNK_ELEMENTS // vocabulary + 100 if device.type == "cuda" else CHUNK_ELEMENTS // 8 // vocabulary + 10
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).to(device, torch.bfloat16)
    weight = (torch.randn(vocabulary, width, generator=generator) / 8).to(device, torch.bfloat16)
    labels = torch.randint(vocabulary, (rows,), generator=generator).to(device)
    right_hidden, right_weight = (tensor.double().requires_grad_() for tensor in (hidden, weight))
    expected = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, rows, 64):
        part = slice(start, start + 64)
        piece = cross_entropy(right_hidden[part] @ right_weight.T, labels[part], reduction="sum")
        piece.backward()
        expected += piece.detach()
    errors = {}
    for way, fused in (("loss", None), ("loss_compiled", compiled_slopes())):
        ours_hidden, ours_weight = (tensor.clone().requires_grad_() for tensor in (hidden, weight))
        scaled, actual = linear_cross_entropy(ours_hidden, ours_weight, labels, 1.0, fused=fused)
        scaled.backward()
        errors[f"{way}_error"] = abs(actual.item() / expected.item() - 1)
        for name, one, other in (("hidden", ours_hidden, right_hidden), ("weight", ours_weight, right_weight)):
            assert one.grad is not None
            assert other.grad is not None
            errors[f"{way}_gradient_{name}_error"] = error_of(one.grad, other.grad)
    # The logits are rounded to bf16 by the product; the loss is their mean and hardly feels it.
    for name, error in errors.items():
        require(name, error, 2e-2 if "gradient" in name else 1e-3)
    return dict(errors)


def staging(device: Device) -> dict[str, Figure]:
    """Copies for a save: exact, in page-locked memory, and an error of locking is not left to the next kernel."""
    from sft_trainer.checkpoint.staging import Cuda, HostStaging

    elements = 2**27 if device.type == "cuda" else 2**20
    tensors = [
        torch.randn(elements, device=device),
        torch.randn(elements, device=device).bfloat16(),
        torch.arange(7, device=device),
        torch.tensor(3.0, device=device),
    ]
    host = HostStaging(device)
    host.copier(tensors)()
    began = time.perf_counter()
    copies = host.copier(tensors)()
    seconds = time.perf_counter() - began
    # Copies go on beside what the device computes, and yet after all that it was told before.
    size = 4096 if device.type == "cuda" else 64
    work = torch.randn(size, size, device=device)
    for _ in range(20):
        work = (work @ work).tanh()
    tensors[0].add_(work[0, 0])
    copies = host.copier(tensors)()
    for copy, tensor in zip(copies, tensors, strict=True):
        if not torch.equal(copy, tensor.cpu()):
            raise AssertionError(f"a copy of {tensor.numel()} elements of {tensor.dtype} differs")
    figures: dict[str, Figure] = {"staging_gb_per_second": sum(tensor.nbytes for tensor in tensors) / seconds / 1e9}
    if device.type == "cpu":
        return figures
    if not host._locked:
        raise AssertionError("the host memory was not page-locked: copies are slow")
    cuda, block = Cuda(), torch.empty(2**20, dtype=torch.uint8)
    if code := cuda.lock(block):
        raise AssertionError(f"CUDA error {code} from locking 1 MiB")
    if not (code := cuda.lock(block)):
        raise AssertionError("locking the same memory twice is no error")
    cuda.forget_error(device)
    if torch.arange(4, device=device).sum().item() != 6:
        raise AssertionError("a kernel after an error of locking computes nonsense")
    cuda.unlock(block)
    return figures | {"staging_lock_twice_error": code}


def group(device: Device) -> dict[str, Figure]:
    """The process group of one process: NCCL on a GPU."""
    import torch.distributed as dist

    from sft_api.ports import free_port
    from sft_trainer.distributed import Ranks, device_for, join_group, sum_over_ranks, summed

    ranks = Ranks(
        rank=0, local_rank=0, local_world_size=1, world_size=1, address="127.0.0.1", port=free_port(), generation="1"
    )
    ours = device_for(ranks, 1 if device.type == "cuda" else 0)
    join_group(ranks, ours)
    # As the trainer does it: a second group over the CPU, for checkpoints.
    dist.new_group(backend="gloo")
    sums = sum_over_ranks([1.5, torch.tensor(2.0, device=ours), 1.0], ours)
    if sums != [1.5, 2.0, 1.0]:
        raise AssertionError(f"the sums over one process are {sums}")
    if device.type == "cuda":
        # Once a step, between the gradients and the update: a host that waits there leaves the GPU idle after it.
        there = torch.tensor(2.0, device=ours)
        torch.cuda.set_sync_debug_mode("error")
        try:
            summed([1.5, there, 1.0], ours)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    backend = str(dist.get_backend())
    dist.destroy_process_group()
    if device.type == "cuda" and backend != "nccl":
        raise AssertionError(f"the backend on a GPU is {backend}")
    return {"group_backend": backend}


def flight_recorder(device: Device) -> dict[str, Figure]:
    """A process that is in a group of NCCL's and answers nothing else writes its recording down when it is asked to."""
    if device.type == "cpu":
        raise Skipped("cpu")
    import torch.distributed as dist

    from sft_api.ports import free_port
    from sft_trainer.distributed import Ranks, device_for, join_group
    from sft_trainer.supervisor.traces import ask_recorder, recorder_environment, recording_of

    with tempfile.TemporaryDirectory(prefix="sft-recorder-") as folder:
        environment = recorder_environment(Path(folder))
        os.environ |= environment
        ranks = Ranks(0, 0, 1, 1, address="127.0.0.1", port=free_port(), generation="1")
        join_group(ranks, device_for(ranks, 1))
        dist.all_reduce(torch.ones(2, device=device))
        recording, began = recording_of(environment, 0), time.monotonic()
        asked = False
        # The pipe is made by a thread, and looked at once a second.
        while not recording.exists() or not recording.stat().st_size:
            asked = asked or ask_recorder(environment, 0)
            if time.monotonic() - began > _RECORDING_SECONDS:
                raise AssertionError(f"no recording after {_RECORDING_SECONDS:.0f} s; asked: {asked}")
            time.sleep(0.05)
        # Not unpickled, here either.
        if b"all_reduce" not in recording.read_bytes():
            raise AssertionError("the recording does not name the collective that there was")
        seconds, size = time.monotonic() - began, recording.stat().st_size
        dist.destroy_process_group()
    return {"flight_recorder_seconds": seconds, "flight_recorder_bytes": size}


def monitor(device: Device) -> dict[str, Figure]:
    """What the supervisor tells of a GPU, without starting CUDA, is of this one."""
    if device.type == "cpu":
        raise Skipped("cpu")
    if importlib.util.find_spec("pynvml") is None:
        raise Skipped("nvidia-ml-py")
    from sft_trainer.supervisor.gpus import Gpus

    gpus, began = Gpus(1), time.monotonic()
    (told,) = gpus.read()
    seconds = time.monotonic() - began
    total = torch.cuda.get_device_properties(device).total_memory
    if told.memory_total is None or abs(told.memory_total / total - 1) > 0.1:
        raise AssertionError(f"the GPU has {total} bytes, and {told.memory_total} are told")
    if None in (told.utilization, told.temperature, told.power, told.sm_clock, told.slowed_by):
        raise AssertionError(f"not all is told: {told}")
    return {"gpu_watts": told.power or 0.0, "gpu_celsius": told.temperature or 0.0, "monitor_seconds": seconds}


def memory(device: Device) -> dict[str, Figure]:
    """What the choice of bins in one forward pass is made from is what the GPU has."""
    if device.type == "cpu":
        raise Skipped("cpu")
    from sft_trainer.strategies.fsdp.memory import CudaMemory
    from sft_trainer.versions import AllocationHistory

    of, size = CudaMemory(device), 2**28
    before, available = of.allocated(), of.available()
    history = AllocationHistory()
    history.begin()
    held = torch.ones(size, dtype=torch.uint8, device=device)
    with tempfile.TemporaryDirectory(prefix="sft-snapshot-") as folder:
        history.write(Path(folder) / "snapshot")
        history.end()
        if b"kernels.py" not in (Path(folder) / "snapshot").read_bytes():
            raise AssertionError("the memory snapshot does not name the line that allocated")
    if of.allocated() - before != held.nbytes:
        raise AssertionError(f"{of.allocated() - before} bytes were seen of {held.nbytes}")
    del held
    total = torch.cuda.get_device_properties(device).total_memory
    if of.allocated() != before or of.most_allocated() < before + size or not size < of.available() <= total:
        raise AssertionError(f"now {of.allocated()}, at most {of.most_allocated()}, could be {of.available()}/{total}")
    if abs(of.available() - available) > size:
        raise AssertionError(f"what can be had was {available} and is {of.available()}, with as much in use")
    return {"memory_gib": total / 2**30}


def out_of_memory(device: Device) -> dict[str, Figure]:
    """What torch raises when the memory of the GPU is used up is told from other errors."""
    if device.type == "cpu":
        raise Skipped("cpu")
    from sft_api.failures import FailureClass
    from sft_trainer.classify import classify

    held = []
    try:
        while True:
            held.append(torch.empty(2**33, dtype=torch.uint8, device=device))
    except RuntimeError as error:
        failure, message = classify(error, step=1)
    held.clear()
    if failure != FailureClass.OUT_OF_MEMORY:
        raise AssertionError(f"taken for {failure}: {message[:200]}")
    if torch.ones(4, device=device).sum().item() != 4:
        raise AssertionError("the device computes nonsense after it")
    return {"out_of_memory_class": failure.value}
