"""What `test_bundle_use_gpu` runs: operators with a bundle (`TILELOOM_BUNDLE`) and no compiler.

It prints the milliseconds that each operator's first call takes in this process.
"""

import json
import time

import torch
import triton

import tileloom
from tileloom.errors import CompileError
from tileloom.ops.rowwise.rms_norm.reference import rms_norm_reference
from tileloom.ops.rowwise.softmax.reference import softmax_reference
from tileloom.testing import assert_accurate


def _no_compiler(*arguments, **named):
    raise AssertionError("a kernel was compiled")


def main():
    triton.compiler.compile = triton.compile = _no_compiler
    torch.manual_seed(0)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    took = {}
    results = {}
    for name, call in (
        ("rms_norm", lambda: tileloom.rms_norm(x, weight)),
        ("softmax", lambda: tileloom.softmax(x)),
    ):
        for turn in ("first", "second", "third"):
            start = time.perf_counter()
            results[name] = call()
            torch.cuda.synchronize()
            took[f"{name} {turn}"] = round(1e3 * (time.perf_counter() - start), 3)
    f64, bf16 = torch.float64, torch.bfloat16
    rms = [rms_norm_reference(x, weight, compute_dtype=dtype) for dtype in (f64, bf16)]
    assert_accurate(results["rms_norm"], *rms, name="rms_norm")
    soft = [softmax_reference(x, compute_dtype=dtype) for dtype in (f64, bf16)]
    assert_accurate(results["softmax"], *soft, name="softmax")
    try:
        tileloom.softmax(x[:, :1000])
    except CompileError as error:
        text = str(error)
        assert "TILELOOM_JIT=forbid (knob launch.jit) forbids, and '" in text, text
        assert "does not hold it.\n" in text, text
        assert "  types: " in text, text
    else:
        raise AssertionError("a kernel that no bundle has was launched")
    print(json.dumps(took))


if __name__ == "__main__":
    main()
