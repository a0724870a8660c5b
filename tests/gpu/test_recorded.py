"""What is made of a trace of steps: here of one that was written by hand."""

import gzip
import json
from pathlib import Path

import pytest

from tests.gpu.recorded import Kernel, kernels_in, shares


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x152_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "compiled"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        (
            "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<c10::BFloat16, float>>",
            "copies",
        ),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda>", "copies"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16>>", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(name: str, kind: str) -> None:
    assert Kernel(name, 0, 1).kind == kind


def test_the_time_is_that_of_kernels_and_of_none(tmp_path: Path) -> None:
    # Given a product, a copy within it, one that outlasts it, and a pause before the last kernel
    events = [
        {"ph": "X", "cat": "kernel", "name": "nvjet_a", "ts": 100.0, "dur": 40.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 110.0, "dur": 10.0},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset", "ts": 130.0, "dur": 20.0},
        {"ph": "X", "cat": "kernel", "name": "triton_poi_b", "ts": 190.0, "dur": 10.0},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 500.0},
        {"ph": "M", "name": "process_name"},
    ]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)

    found = shares(reversed(kernels_in(tmp_path / "trace.json.gz")))

    assert found == pytest.approx({"waiting": 0.4, "products": 0.4, "copies": 0.3, "compiled": 0.1})
