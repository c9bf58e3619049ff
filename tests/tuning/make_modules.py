"""Writes the modules of `modules/`: what Inductor makes of small models for an H100.

Beside each lies what Inductor itself chooses from: configs by kernel, each with its grid.

Usage: ``PYTHONPATH=src:. python -m tests.tuning.make_modules [NAME ...]``, without a GPU, or on an
H100. Inductor asks a device for its properties and never launches on it while it writes code: the
properties below are an H100's, tensors are fake, and Triton has a driver that knows its target
alone. What needs a measurement (templates of matrix products under max-autotune) cannot be made
this way.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from tests.tuning.modules import arguments_of, kernels_of, launches_of, load, recorded
from torch.nn import functional as F

VERSION = f"torch_{'.'.join(torch.__version__.split('.')[:2])}"
FOLDER = Path(__file__).parent / "modules" / VERSION
HALF = torch.float16


@dataclass(frozen=True)
class Model:
    """A function, the sizes of its arguments (or tensors), and settings of Inductor."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    symbolic: bool = False


def attention(x, qkv, out):
    """One block with four heads, its scores in full."""
    q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (x @ qkv).chunk(3, -1))
    scores = (q @ k.transpose(-1, -2)) * 32**-0.5
    return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ out


def mlp(x, up, up_bias, down):
    return x + F.gelu(x @ up + up_bias) @ down


def rms_norm_backward(grad, x, rstd):
    normal = x * rstd
    dx = rstd * (grad - normal * (grad * normal).mean(-1, keepdim=True))
    return dx, (grad * normal).sum(0)


def embedding(tokens, words, places):
    return F.layer_norm(F.embedding(tokens, words) + places, (256,))


def convolution(x, weight, bias, scale, shift):
    return F.relu(F.conv2d(x, weight, bias, padding=1) * scale + shift)


def adam(*tensors):
    params, grads, means, squares = (list(tensors[i::4]) for i in range(4))
    means = torch._foreach_lerp(means, grads, 0.1)
    squares = torch._foreach_addcmul(torch._foreach_mul(squares, 0.999), grads, grads, 0.001)
    steps = torch._foreach_div(means, torch._foreach_add(torch._foreach_sqrt(squares), 1e-8))
    return (*torch._foreach_add(params, steps, alpha=-1e-3), *means, *squares)


def long_row(x):
    return x.sum(), x.abs().amax()


def several(a, b, c):
    return F.gelu(a), torch.sigmoid(b) * 2, c.sum(-1)


def tiled(x, y):
    return (x.permute(0, 2, 1).reshape(-1, 512).exp() + y).sum(-1)


@triton.jit
def scaled_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n) * 3, at < n)


def own_kernel(x):
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 256),)
    torch.library.wrap_triton(scaled_kernel)[grid](x, y, x.numel(), BLOCK=256)
    return y + 1


TOKENS = torch.int64
TMA = {"triton.use_tensor_descriptor": True, "assume_aligned_inputs": True}
COMBO = {"combo_kernels": True, "combo_kernel_peak_memory_pct_threshold": None}
MODELS = {
    "attention": Model(attention, ((8, 256, 128), (128, 384), (128, 128)), dtype=HALF),
    "mlp": Model(mlp, ((2048, 256), (256, 1024), (1024,), (1024, 256)), dtype=HALF),
    "layer_norm": Model(lambda x, w: F.layer_norm(x, (1024,), w), ((4096, 1024), (1024,))),
    "rms_norm_backward": Model(rms_norm_backward, ((16384, 768), (16384, 768), (16384, 1))),
    "softmax": Model(lambda x: x.softmax(-1), ((512, 50257),)),
    "embedding": Model(embedding, (((16, 128), TOKENS), (30522, 256), (128, 256))),
    "convolution": Model(
        convolution, ((8, 32, 56, 56), (64, 32, 3, 3), (64,), (64, 1, 1), (64, 1, 1))
    ),
    "adam": Model(adam, tuple(n for n in ((256, 256), (1000,), (64, 3, 3)) for _ in range(4))),
    "scan": Model(lambda x: x.cumsum(0), ((1 << 20,),)),
    "scan_rows": Model(lambda x: x.cumsum(-1), ((64, 4096),)),
    "long_row": Model(long_row, ((1 << 24,),)),
    "long_row_cooperative": Model(
        lambda x: x.sum(-1), ((4, 1 << 20),),
        {"triton.cooperative_reductions": True},
    ),
    "combo": Model(several, ((1 << 16,), (1000, 33), (512, 64)), COMBO),
    "combo_blocks": Model(
        several, ((1 << 16,), (1000, 33), (512, 64)),
        {**COMBO, "combo_kernel_per_subkernel_blocks": True},
    ),
    "transposed": Model(lambda x, y: x + y.t(), ((1024, 2048), (2048, 1024))),
    "outer": Model(lambda x: x.sum(0), ((4096, 4096),)),
    "dynamic": Model(lambda x, y: (x * y).sum(-1), ((300, 700), (300, 700)), symbolic=True),
    "tma": Model(torch.add, ((1024, 2048), (1024, 2048)), TMA),
    "tma_rows": Model(lambda x: x.sum(-1), ((1024, 8192),), TMA),
    "matmul": Model(
        lambda x, y: (x @ y).relu(), ((512, 256), (256, 1024)), {"triton.native_matmul": True},
        dtype=HALF,
    ),
    "tiled": Model(
        tiled, ((64, 512, 32), (2048, 512)),
        {"triton.tile_reductions": True, "triton.prefer_nd_tiling": True},
    ),
    "deterministic": Model(lambda x: x.sum(0), ((4096, 512),), {"deterministic": True}),
    "own_kernel": Model(own_kernel, ((10_000,),)),
}  # fmt: skip


class _H100:
    """What Inductor asks of `torch.cuda.get_device_properties`."""

    name = "NVIDIA H100 80GB HBM3"
    major, minor = 9, 0
    multi_processor_count = 132
    total_memory = 80 * 2**30
    regs_per_multiprocessor = 65536
    max_threads_per_multi_processor = 2048
    max_threads_per_block = 1024
    warp_size = 32
    L2_cache_size = 50 * 2**20
    shared_memory_per_block = 49152
    shared_memory_per_block_optin = 232448
    shared_memory_per_multiprocessor = 233472


class _Driver:
    """A driver of Triton's that knows what to compile for."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


def answers_of(stack, place, name, answer):
    stack.enter_context(mock.patch.object(place, name, return_value=answer))


@contextlib.contextmanager
def h100():
    """Make PyTorch and Triton believe in an H100 that only tells its properties."""
    if torch.cuda.is_available():  # believe what there is
        yield
        return
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses import fake_tensor
    from triton.runtime.driver import driver

    properties = _H100()
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0,
        "get_device_properties": properties, "get_device_capability": (9, 0),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            answers_of(stack, torch.cuda, name, answer)
        for place in (CudaInterface, CudaInterface.Worker):
            answers_of(stack, place, "get_device_properties", properties)
        answers_of(stack, CudaInterface, "get_compute_capability", 90)
        # A build with CUDA would make a context.
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context"))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "12.8"))
        stack.enter_context(mock.patch.object(driver, "_active", _Driver()))
        yield


def arguments(model: Model, device: torch.device, seed: int = 0) -> list[torch.Tensor]:
    """Real arguments of a model: normal numbers, and tokens from 0 to 30,521.

    Those of matrix products but the first are weights, and scaled as such: a softmax of larger
    scores would say which of two rounded scores is larger, and little else.
    """
    made = []
    for i, (size, dtype) in enumerate(_typed(given, model.dtype) for given in model.arguments):
        generator = torch.Generator(device).manual_seed(seed + i)
        if dtype.is_floating_point:
            values = torch.randn(size, generator=generator, device=device)
            values = values * size[0] ** -0.5 if i and model.dtype is HALF else values
            made.append(values.abs() if model.function is adam else values)
        else:
            made.append(torch.randint(30522, size, generator=generator, device=device))
        made[-1] = made[-1].to(dtype)
    return made


def written(model: Model) -> str:
    """Return the module that Inductor writes for a model."""
    import torch._inductor.config as settings
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes, symbols = ShapeEnv(), {}
    mode = FakeTensorMode(shape_env=shapes)
    known = {name: value for name, value in model.settings.items() if name in settings._config}
    with h100(), settings.patch(known), mode:
        arguments = []
        for size, dtype in (_typed(given, model.dtype) for given in model.arguments):
            if model.symbolic:
                size = [symbols.setdefault(n, _symbol(shapes, n)) for n in size]
            arguments.append(torch.empty(*size, device="cuda", dtype=dtype))
        graph = make_fx(
            model.function,
            decomposition_table=select_decomp_table(),
            tracing_mode="symbolic" if model.symbolic else "fake",
        )(*arguments)
        given = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        lowering = GraphLowering(graph, example_inputs=given, shape_env=mode.shape_env)
        with (
            V.set_graph_handler(lowering),
            V.set_fake_mode(mode),
            V.set_debug_handler(DebugContext()),
        ):
            lowering.run(*given)
            code, _ = lowering.codegen()
    notes = r"^# ((?:kernel|Original) path|Source node|Topolog|Graph frag|  +[%r]).*\n"
    return re.sub(notes, "", code.value, flags=re.MULTILINE)


def _symbol(shapes: Any, size: int) -> Any:
    """A size that the module is to take as an argument."""
    from torch._dynamo.source import ConstantSource

    symbol = shapes.create_symbol(size, source=ConstantSource(f"s{size}"))
    return shapes.create_symintnode(symbol, hint=size)


def _typed(given: Any, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    return given if isinstance(given[-1], torch.dtype) else (given, dtype)


def original(text: str) -> dict[str, Any]:
    """Return what Inductor itself chooses from: configs by kernel, each with the grid it makes."""
    from torch._inductor.runtime import triton_heuristics

    found = {}
    launches = launches_of(text)
    with tempfile.TemporaryDirectory() as folder, h100():
        for name, source in kernels_of(text):
            with recorded(triton_heuristics) as made:
                module = load(source, Path(folder))
            (asked,) = made
            values = dict(zip(arguments_of(getattr(module, name), asked.meta), launches[name]))
            configs = zip(asked.plain, triton_heuristics.unique_configs(asked.configs))
            found[name] = [
                [*plain, triton_heuristics.GridExpr.from_meta(asked.meta, c).eval_slow(values)]
                for plain, c in configs
            ]
    return found


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or MODELS:
        text = written(MODELS[name])
        (FOLDER / f"{name}.txt").write_text(text)
        configs = json.dumps(original(text), indent=1)
        (FOLDER / f"{name}.configs.json").write_text(configs + "\n")
        print(name, len(text), sorted(set(re.findall(r"^@triton_heuristics\.(\w+)", text, re.M))))
