"""The package flash-attn-4 itself: its kernels are made without a GPU; and no import starts CUDA for it."""

import os
import re
import subprocess
import sys

import pytest

_MAKE = """
import json, os, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from sft_trainer.models.flash_attention import _forward, _gradients
from sft_trainer.versions import find_flash_attention_4
assert find_flash_attention_4()
import flash_attn.cute.interface
made = dict(dtype=torch.bfloat16, device="cuda")
for size, sharing, window, cap, sinks in json.loads(sys.argv[1]):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, (size, sharing)
        continue
    with FakeTensorMode():
        query = torch.empty(1024, 2 * sharing, size, **made)
        key, value = torch.empty(2, 1024, 2, size, **made)
        sink = torch.empty(2 * sharing, **made) if sinks else None
        options = (torch.empty(5, dtype=torch.int32, device="cuda"), 512, 0.1, window, cap)
        output, logarithms = _forward(query, key, value, sink, *options)
        gradients = _gradients(torch.empty_like(output), query, key, value, sink, output, logarithms, *options)
    print("made:", *(tuple(tensor.shape) for tensor in gradients))
    break
"""
_COMPARED = """
import json, os, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from sft_trainer.models.attention_choice import LAYOUTS
from sft_trainer.models.flash_attention import _forward, _gradients
from sft_trainer.versions import find_flash_attention_4
find_flash_attention_4()
import cutlass.cute
made = []
class Compiler:
    def __getitem__(self, options):
        return self
    def __call__(self, kernel, *given, **options):
        made.append(type(kernel).__name__)
        return made[-1]
cutlass.cute.compile = Compiler()
import flash_attn.cute.interface
def attend(size, sharing, documents, longest, tokens, keys):
    shape = dict(dtype=torch.bfloat16, device="cuda")
    query = torch.empty(tokens, keys * sharing, size, **shape)
    key, value = torch.empty(2, tokens, keys, size, **shape)
    options = (torch.empty(documents + 1, dtype=torch.int32, device="cuda"), longest, 0.1, None, None)
    output, logarithms = _forward(query, key, value, None, *options)
    _gradients(torch.empty_like(output), query, key, value, None, output, logarithms, *options)
for size, sharing in json.loads(sys.argv[1]):
    if child := os.fork():  # a kernel that was made for another kind would not be made again
        assert os.waitpid(child, 0)[1] == 0, (size, sharing)
        continue
    with FakeTensorMode():
        for lengths in LAYOUTS:
            longest = max(256, 1 << (max(lengths) - 1).bit_length())
            attend(size, sharing, len(lengths), longest, sum(lengths), 2)
        assert "FlashAttentionBackwardPreprocess" in made
        made.clear()
        for keys in (1, 8):
            for longest in (256, 512, 4096, 131072):
                for documents in (1, 5, 256, 257, 5000):
                    attend(size, sharing, documents, longest, 131072, keys)
    print("made in a step:", size, sharing, *made)
    break
"""
_IMPORT = """
import importlib
import torch
torch.cuda.is_available = lambda: print("CUDA was asked")
from sft_trainer.launch import WORKER_IMPORTS
for name in WORKER_IMPORTS:
    importlib.import_module(name)
print("imported")
"""


def said_by(code: str, *arguments: str, **environment: str) -> str:
    """What the program prints, without the warnings of others."""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, env=os.environ | paths | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


QWEN_3 = "[128, 2, null, null, false]"
GPT_OSS = "[64, 8, 128, null, true]"
GEMMA_2 = "[256, 2, 128, 50.0, false]"
GRADIENTS = {
    QWEN_3: "made: (1024, 4, 128) (1024, 2, 128) (1024, 2, 128) (0,)",
    GPT_OSS: "made: (1024, 16, 64) (1024, 2, 64) (1024, 2, 64) (16,)",
    GEMMA_2: "made: (1024, 4, 256) (1024, 2, 256) (1024, 2, 256) (0,)",
}


@pytest.mark.parametrize(("architecture", "kinds"), [("sm_90a", (QWEN_3, GPT_OSS, GEMMA_2)), ("sm_100a", (GPT_OSS,))])
def test_it_makes_kernels_for_what_it_is_called_with(architecture: str, kinds: tuple[str, ...]) -> None:
    target = {"FLASH_ATTENTION_ARCH": architecture, "CUTE_DSL_ARCH": architecture, "FLASH_ATTENTION_NUM_SMS": "132"}
    said = said_by(_MAKE, f"[{', '.join(kinds)}]", **target)
    assert re.findall("made: .*", said) == [GRADIENTS[kind] for kind in kinds]


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_no_step_has_a_kernel_that_was_not_compared(architecture: str) -> None:
    # It makes others for many documents, and for short ones: a step would wait, and nothing says that they are right.
    target = {"FLASH_ATTENTION_ARCH": architecture, "CUTE_DSL_ARCH": architecture, "FLASH_ATTENTION_NUM_SMS": "132"}
    said = said_by(_COMPARED, "[[128, 1], [128, 2], [64, 8], [256, 2]]", **target)
    assert re.findall("made in a step: .*", said) == [
        f"made in a step: {kind}" for kind in ("128 1", "128 2", "64 8", "256 2")
    ]


def test_what_a_worker_imports_does_not_ask_cuda_for_a_gpu_because_of_it() -> None:
    # A process with CUDA cannot be forked.
    assert said_by(_IMPORT) == "imported"
