"""What `test_bundle_gpu` runs in a process of its own, in which Triton cannot be imported.

`python -m tests.launch.bundle_child BUNDLE WHAT`; it prints nothing if all is well.
"""

import math
import sys

import torch

from tileloom.errors import BundleError, DeviceError, OptionError
from tileloom.launch import TensorDescriptor, load_bundle
from tileloom.launch.bundle_parameters import block_of
from tileloom.testing import assert_accurate


class _NoTriton:
    """Refuse Triton and PyTorch's compiler, whoever asks for them."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton" or name == "torch._inductor":
            raise ImportError(f"{name} must not be needed")


def _said(error, call):
    try:
        call()
    except error as caught:
        return str(caught)
    raise AssertionError(f"no {error.__name__} was raised")


def add(bundle):
    """Every length, an odd one too; the aligned kernel and the other; two dtypes; a stream."""
    kernel = bundle.kernel("add")
    for dtype in (torch.float32, torch.float16):
        for n in (1, 1023, 1024, 7 * 1024 + 13):
            x, y = torch.randn(2, n, device="cuda").to(dtype)
            room = torch.full((n + 64,), float("nan"), device="cuda", dtype=dtype)
            kernel[(-(-n // 1024),)](x, y.clone(), room[:n], n, BLOCK=1024)
            assert torch.equal(room[:n], x + y)
            assert bool(room[n:].isnan().all())
    x, y = torch.randn(2, 1001, device="cuda")
    out = torch.empty(1001, device="cuda")
    kernel[(1,)](x[1:], y[1:], out[1:], 1000)
    assert torch.equal(out[1:], x[1:] + y[1:])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        x = torch.ones(4096, device="cuda")
        out = torch.empty_like(x)
        kernel[lambda meta: (-(-meta["n"] // meta["BLOCK"]),)](x, x, out, 4096)
        assert bool((out == 2).all())
    half = x.double()
    assert "fp64, it takes fp32" in _said(OptionError, lambda: kernel[(1,)](half, half, half, 1))
    there = x.cpu()
    assert "is on the device cpu" in _said(DeviceError, lambda: kernel[(1,)](x, x, there, 1))
    older = bundle.kernel("older")
    said = _said(BundleError, lambda: older[(1,)](x, x, out, 4096))
    assert "it is built for sm_80, the GPU is an sm_9" in said


def scalars(bundle):
    """Every kind of number arrives as it was given."""
    given = {
        "a": True, "b": -3, "c": 250, "d": -30000, "e": -(2**31), "f": 2**32 - 1, "g": -(2**53),
        "h": 2**53, "i": 0.1, "j": 0.1, "k": 3.14159,
    }  # fmt: skip
    out = torch.zeros(16, dtype=torch.float64, device="cuda")
    bundle.kernel("scalars")[(1,)](out, **given, absent=None, one=1, MODE="twelve")
    wanted = [float(value) for value in given.values()]
    wanted[8] = float(torch.tensor(0.1, dtype=torch.float32))
    wanted[10] = 3.140625  # the upper half of its float32
    assert out.tolist() == [*wanted, 1.0, 12.0, 0.0, 0.0, 0.0]


def scratch(bundle):
    """A descriptor that the kernel makes in scratch memory."""
    x = torch.randn(32, 32, device="cuda")
    out = torch.empty_like(x)
    bundle.kernel("scratch")[(1,)](x, out)
    assert torch.equal(out, x)


def attention_arguments(variant, q, k, v, out, lse, counter, *, causal):
    """Arguments of our attention forward by name, None or 0 for what it lacks; and its tiles."""
    boxes = {p.name: block_of(p.type)[1] for p in variant.parameters if p.descriptor}
    batch, heads, length, dim = q.shape
    tiles = -(-length // (64 * variant.constants["CONSUMERS"]))
    most = 2 * length
    takes = {p.name for p in variant.parameters if p.type != "constexpr"}
    tensors = {"q_desc": q, "k_desc": k, "v_desc": v, "o_desc": out}
    strides = zip(("o_batch_stride", "o_head_stride", "o_row_stride"), out.stride()[:3])
    band = {"left_top": most, "right_top": 0 if causal else most}
    given = {
        **{name: TensorDescriptor.from_tensor(tensors[name], boxes[name]) for name in tensors},
        "o_ptr": out, "lse_ptr": lse, "counter": counter if "counter" in takes else None,
        "scale": math.log2(math.e) / math.sqrt(dim), "heads_q": heads, "group": 1,
        "len_q": length, "len_k": length, "head_dim_8": dim // 8, "tiles": tiles,
        "heads": batch * heads, "section": batch * heads, **band,
        "left_bottom": most, "right_bottom": most,
        **{name: stride // 8 for name, stride in strides},
    }  # fmt: skip
    needed = [p for p in variant.parameters if p.name not in given and not p.optional]
    return given | {p.name: None if p.type == "constexpr" else 0 for p in needed}, tiles


def launch_attention(bundle, name, q, k, v, *, causal, sms):
    """Launch our attention forward by hand, as its launcher does, without its module's Triton."""
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:3], float("nan"), device=q.device)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    variant = bundle.kernel(name).variants[0]
    arguments, tiles = attention_arguments(variant, q, k, v, out, lse, counter, causal=causal)
    bundle.kernel(name)[(min(tiles * q.shape[0] * q.shape[1], sms),)](**arguments)
    return out, lse


def attention(bundle):
    """A Gluon kernel with TMA descriptors and warp specialisation."""
    from tileloom.ops.attention import attention_reference

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for name, dim, causal in (
        ("attention_fwd_gluon_sm90[d128-causal-bf16]", 128, True),
        ("attention_fwd_gluon_sm90[d64-full-bf16]", 64, False),
    ):
        q, k, v = torch.randn(3, 2, 4, 1024, dim, device="cuda", dtype=torch.bfloat16)
        out, lse = launch_attention(bundle, name, q, k, v, causal=causal, sms=sms)
        wanted, wanted_lse = attention_reference(
            q, k, v, is_causal=causal, return_lse=True, compute_dtype=torch.float64
        )
        plain, plain_lse = attention_reference(
            q, k, v, is_causal=causal, return_lse=True, compute_dtype=torch.bfloat16
        )
        assert_accurate(out, wanted, plain, name=name)
        assert_accurate(lse, wanted_lse, plain_lse, name=f"{name} lse")


def graph(bundle):
    """First and later launches inside a captured graph."""
    kernel = bundle.kernel("add[fp32]")
    x = torch.arange(4096, dtype=torch.float32, device="cuda")
    out = torch.zeros_like(x)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        kernel[(4,)](x, x, out, 4096)
        kernel[(4,)](out, x, out, 4096)
    assert bool((out == 0).all())
    captured.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, 3 * x)


def main():
    sys.modules["triton"] = None
    sys.meta_path.insert(0, _NoTriton())
    torch.manual_seed(0)
    bundle = load_bundle(sys.argv[1])
    {f.__name__: f for f in (add, scalars, scratch, attention, graph)}[sys.argv[2]](bundle)
    torch.cuda.synchronize()
    assert sys.modules["triton"] is None
    assert not [name for name in sys.modules if name.startswith(("triton.", "torch._inductor"))]


if __name__ == "__main__":
    main()
