"""What `test_bundle_gpu` runs: operators with a bundle (`TILELOOM_BUNDLE`) and no compiler.

`python -m tests.launch.bundle_ops_child WHAT` prints the milliseconds that the first three calls
take in this process. With a file's name behind it, it calls once with a compiler, and builds a
bundle of what was launched.
"""

import json
import sys
import time

import torch
import triton

import tileloom
from tileloom.errors import CompileError
from tileloom.launch import build_bundle, record_specs
from tileloom.ops.attention.reference import attention_reference
from tileloom.ops.rowwise.rms_norm.reference import rms_norm_reference
from tileloom.ops.rowwise.softmax.reference import softmax_reference
from tileloom.testing import assert_accurate


def _no_compiler(*arguments, **named):
    raise AssertionError("a kernel was compiled")


def _rms_norm():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)

    def reference(dtype):
        return rms_norm_reference(x, weight, compute_dtype=dtype)

    return lambda: tileloom.rms_norm(x, weight), reference


def _softmax():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    return lambda: tileloom.softmax(x), lambda dtype: softmax_reference(x, compute_dtype=dtype)


def _attention():
    q, k, v = torch.randn(3, 1, 16, 4096, 128, device="cuda", dtype=torch.bfloat16)

    def reference(dtype):
        return attention_reference(q, k, v, is_causal=True, compute_dtype=dtype)

    return lambda: tileloom.attention(q, k, v, is_causal=True), reference


def _training():
    """Forward and backward of three operators, one after another."""
    x = torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16)
    gate = torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(2048, (512,), device="cuda")
    weight = torch.ones(2048, device="cuda", dtype=torch.bfloat16)

    def step(rms_norm, swiglu, cross_entropy, dtype):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, gate, weight)]
        h = swiglu(rms_norm(leaves[0], leaves[2]), leaves[1])
        cross_entropy(h, labels).sum().backward()
        return torch.cat([leaf.grad.flatten() for leaf in leaves])

    def call():
        return step(tileloom.rms_norm, tileloom.swiglu, tileloom.cross_entropy, torch.bfloat16)

    def reference(dtype):
        functional = torch.nn.functional

        def norm(x, weight):
            return functional.rms_norm(x, x.shape[-1:], weight)

        def gated(x, y):
            return functional.silu(x) * y

        return step(norm, gated, functional.cross_entropy, dtype)

    return call, reference


def _record(call, path):
    with record_specs() as specs:
        call()
        call()
    torch.cuda.synchronize()
    build_bundle(path, [(spec, spec.archs[0]) for spec in specs], workers=4)
    print(len(specs), "kernels")


def _what_is_missing():
    """What no bundle has is refused, and everything that it would be compiled from is listed."""
    x = torch.randn(4096, 1001, device="cuda")
    try:
        tileloom.softmax(x)
    except CompileError as error:
        text = str(error)
        assert "TILELOOM_JIT=forbid (knob launch.jit) forbids, and '" in text, text
        assert "does not hold it.\n" in text, text
        assert "  types: x=*fp32" in text, text
    else:
        raise AssertionError("a kernel that no bundle has was launched")


_CALLS = {
    "rms_norm": _rms_norm,
    "softmax": _softmax,
    "attention": _attention,
    "training": _training,
}


def main():
    torch.manual_seed(0)
    call, reference = _CALLS[sys.argv[1]]()
    if len(sys.argv) > 2:
        _record(call, sys.argv[2])
        return
    triton.compiler.compile = triton.compile = _no_compiler
    torch.cuda.synchronize()
    took = []
    for _ in range(3):
        start = time.perf_counter()
        result = call()
        torch.cuda.synchronize()
        took.append(round(1e3 * (time.perf_counter() - start), 3))
    assert_accurate(result, reference(torch.float64), reference(torch.bfloat16), name=sys.argv[1])
    _what_is_missing()
    print(json.dumps({sys.argv[1]: took}))


if __name__ == "__main__":
    main()
