"""What `test_bundle_use` runs in a process of its own: launchers over a fake libcuda.

`python -m tests.launch.bundle_use_child BUNDLE FOLDER` prints JSON: for each case "" or an error.
"""

import contextlib
import dataclasses
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import triton
from tests.launch.bundle_kernels import add_kernel, scratch_kernel
from tests.launch.fake_cuda import DeviceTensor, FakeCuda
from tests.launch.kernel_samples import wgmma_kernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileloom import knobs
from tileloom.errors import BundleError, CompileError
from tileloom.launch import (
    build_bundle,
    load_bundle,
    prepare,
    record_specs,
    use_bundle,
    watch,
)
from tileloom.launch.bundle_format import write_bundle
from tileloom.launch.bundle_key import kernel_key
from tileloom.launch.bundle_use import active_bundle
from tileloom.launch.bundle_variant import LoadedKernel

PATH, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])


def said(error, call):
    try:
        call()
    except error as caught:
        return str(caught)
    raise AssertionError(f"no {error.__name__} was raised")


def three(**more):
    return [DeviceTensor(**more) for _ in range(3)]


def no_bundle_and_no_compiler(cuda):
    knobs.set("launch.jit", "forbid")
    x, y, out = three()
    text = said(CompileError, lambda: prepare(add_kernel)[(1,)](x, y, out, 77, BLOCK=1024))
    assert text.startswith(
        "launch: tests.launch.bundle_kernels:add_kernel for sm_90 would have to be compiled, which "
        "TILELOOM_JIT=forbid (knob launch.jit) forbids, and there is no bundle.\n"
        "  types: x=*fp32, y=*fp32, out=*fp32, n=i32\n"
        "  multiples of 16: out, x, y\n"
        "  constants: BLOCK=1024\n"
        "  options: none\n"
        "  key: "
    ), text
    assert cuda.count() == 0


def a_kernel_of_the_bundle_is_launched(cuda):
    """First by its variant, from the second launch on prepared; each with the same bytes."""
    knobs.set("launch.jit", "forbid")
    use_bundle(PATH)
    x, y, out = three()
    launcher = prepare(add_kernel)
    records = []
    for _ in range(5):
        compiled = launcher[(7, 2)](x, y, out, 7001, BLOCK=1024)
        assert isinstance(compiled, LoadedKernel)
        assert compiled.variant.name == "add[fp32]"
        cuda.define_sizes(compiled.function, [8, 8, 8, 4, 8, 8])
        records.append(cuda.last())
    assert len(launcher._table) == 1, "the launch was not prepared"
    assert len(set(records[1:])) == 1, records
    assert (records[1].grid, records[1].block, records[1].shared) == ((7, 2, 1), (128, 1, 1), 0)


def it_is_given_what_a_compiled_one_is_given(cuda):
    use_bundle(PATH)
    x, y, out = three()
    seen = []
    for launcher in (prepare(add_kernel), add_kernel):
        for _ in range(3):
            compiled = launcher[(3,)](x, y, out, 5000, BLOCK=1024)
            cuda.define_sizes(compiled.function, [8, 8, 8, 4, 8, 8])
        seen.append(dataclasses.replace(cuda.last(), function=0))
    assert isinstance(compiled, triton.compiler.CompiledKernel)
    assert seen[0] == seen[1]
    assert len(seen[0].values) == 44


def alignment_chooses_the_kernel(cuda):
    knobs.set("launch.jit", "forbid")
    use_bundle(PATH)
    launcher = prepare(add_kernel)
    odd = three(address=4100)
    assert launcher[(1,)](*odd, 77, BLOCK=1024).variant.name == "add[fp32-any]"
    x, y, _ = three()
    text = said(CompileError, lambda: launcher[(1,)](x, y, odd[0], 77, BLOCK=1024))
    assert "  multiples of 16: x, y\n" in text
    text = said(CompileError, lambda: launcher[(1,)](*odd, 80, BLOCK=1024))
    assert "  multiples of 16: n\n" in text
    assert f"and '{PATH}' does not hold it.\n" in text
    text = said(CompileError, lambda: launcher[(1,)](*odd, 1, BLOCK=1024))
    assert "  constants: n=1, BLOCK=1024\n" in text
    text = said(CompileError, lambda: prepare(add_kernel, num_warps=8)[(1,)](*odd, 7, BLOCK=1024))
    assert "  options: num_warps=8\n" in text
    prepare(add_kernel, num_warps=4, num_stages=3)[(1,)](*odd, 77, BLOCK=1024)


def what_is_not_there_is_compiled_where_that_is_allowed(cuda):
    use_bundle(PATH)
    x, y, out = three()
    compiled = prepare(add_kernel)[(1,)](x, y, out, 77, BLOCK=128)
    assert isinstance(compiled, triton.compiler.CompiledKernel)


def descriptors(cuda):
    knobs.set("launch.jit", "forbid")
    use_bundle(PATH)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    import torch

    def descriptor(rows):
        base = DeviceTensor(torch.bfloat16)
        return TensorDescriptor(base, [rows, 512], [512, 1], [rows, 64], layout)

    a, b, (out, _, _) = descriptor(64), descriptor(128), three(address=4100)
    launcher = prepare(wgmma_kernel)
    for i in range(4):
        compiled = launcher[(1,)](a, b, out, 7, N=128, NUM_STAGES=3, SERIAL=False)
        assert compiled.variant.name == "wgmma"
        if i == 0:
            sizes = [*[128, 4, 4, 8, 8] * 2, 8, 4, 8, 8]
            cuda.define_sizes(compiled.function, sizes)
    assert len(cuda.last().values) == sum(sizes)
    assert cuda.last() == cuda.last(2) == cuda.last(3)
    assert cuda.last().shared == 73752


def scratch_memory(cuda):
    import torch

    knobs.set("launch.jit", "forbid")
    use_bundle(PATH)
    asked = []

    def empty(size, dtype, device):
        asked.append(size)
        return DeviceTensor(address=0x7F00CAFE0000)

    torch.empty, before = empty, torch.empty
    torch._C._cuda_getCurrentRawStream = lambda device: cuda.stream  # of PyTorch with CUDA
    try:
        x, out, _ = three()
        launcher = prepare(scratch_kernel)
        for step in range(6):
            compiled = launcher[(3, 2)](x, out, BLOCK=32)
            if step == 0:
                cuda.define_sizes(compiled.function, [8] * 4)
        assert launcher._table, "prepared, as any other"
        compiled._loaded = None  # so that nothing goes the long way
        launcher[(3, 2)](x, out, BLOCK=32)
    finally:
        torch.empty = before
        del torch._C._cuda_getCurrentRawStream
    assert asked == [6 * 128] * 7
    numbers = (x.data_ptr(), out.data_ptr(), 0x7F00CAFE0000, 0)
    values = b"".join(number.to_bytes(8, "little") for number in numbers)
    assert [cuda.last(back).values for back in range(1, 7)] == [values] * 6


def hooks_want_tritons_own_path(cuda):
    knobs.set("launch.jit", "forbid")
    use_bundle(PATH)
    from triton import knobs as theirs

    x, y, out = three()
    launcher = prepare(add_kernel)
    launcher[(1,)](x, y, out, 77, BLOCK=1024)
    hook = print
    theirs.runtime.launch_enter_hook.add(hook)
    try:
        text = said(CompileError, lambda: launcher[(1,)](x, y, out, 77, BLOCK=1024))
    finally:
        theirs.runtime.launch_enter_hook.remove(hook)
    assert text.startswith("launch: 'add_kernel' would go through Triton's own launch"), text
    launcher[(1,)](x, y, out, 77, BLOCK=1024)


def the_plain_tier_is_tritons_own_path(cuda):
    x, y, out = three()
    use_bundle(PATH)
    with knobs.scope({"launch.tier": "plain", "launch.jit": "forbid"}):
        text = said(CompileError, lambda: prepare(add_kernel)[(1,)](x, y, out, 77, BLOCK=1024))
    assert text.startswith("launch: 'add_kernel' would go through Triton's own launch"), text
    assert "the plain tier" in text


def another_source_is_another_kernel(cuda):
    knobs.set("launch.jit", "forbid")
    bundle = load_bundle(PATH)
    variant = bundle.kernel("add[fp32]").variants[0]
    changed = dataclasses.replace(variant, source="0" * 64, key="1" * 64, binary=0)
    write_bundle(FOLDER / "old", [changed], [bundle.binary(variant)], tileloom="0.1.0")
    use_bundle(FOLDER / "old")
    x, y, out = three()
    text = said(CompileError, lambda: prepare(add_kernel)[(1,)](x, y, out, 77, BLOCK=1024))
    assert "does not hold it: it was built from another source of this function.\n" in text


def the_bundle_of_the_environment(cuda):
    assert active_bundle() is None
    os.environ["TILELOOM_BUNDLE"] = str(PATH)
    os.environ["TILELOOM_JIT"] = "Forbid"
    try:
        watch.refresh()
        x, y, out = three()
        compiled = prepare(add_kernel)[(1,)](x, y, out, 77, BLOCK=1024)
        assert compiled.variant.name == "add[fp32]"
        assert active_bundle() is active_bundle()
        use_bundle(FOLDER / "old")
        assert active_bundle().path == FOLDER / "old"
        use_bundle(None)
        assert active_bundle().path == PATH
        os.environ["TILELOOM_BUNDLE"] = str(FOLDER / "no such file")
        said(BundleError, active_bundle)
        os.environ["TILELOOM_JIT"] = "perhaps"
        assert "it must be allow or forbid." in said(knobs.KnobError, active_jit)
    finally:
        del os.environ["TILELOOM_BUNDLE"], os.environ["TILELOOM_JIT"]


def active_jit():
    return knobs.get("launch.jit")


def using_a_bundle_makes_launchers_look_again(cuda):
    x, y, out = three()
    launcher = prepare(add_kernel)
    for _ in range(3):
        compiled = launcher[(1,)](x, y, out, 77, BLOCK=1024)
    assert isinstance(compiled, triton.compiler.CompiledKernel)
    use_bundle(PATH)
    assert isinstance(launcher[(1,)](x, y, out, 77, BLOCK=1024), LoadedKernel)


def what_a_program_launches_can_be_recorded_and_bundled(cuda):
    x, y, out = three()
    odd = three(address=4100)
    launcher, other = prepare(add_kernel), prepare(add_kernel, num_warps=8, maxnreg=64)
    launcher[(1,)](x, y, out, 77, BLOCK=256)  # known before, and recorded all the same
    with record_specs() as specs:
        for _ in range(3):
            launcher[(1,)](x, y, out, 77, BLOCK=256)
            launcher[(1,)](*odd, 1, BLOCK=256)
            other[(1,)](x, y, out, 77, BLOCK=256)
    launcher[(1,)](x, y, out, 96, BLOCK=256)
    assert [(spec.num_warps, spec.options) for spec in specs] == [
        (4, {}), (4, {}), (8, {"maxnreg": 64})
    ]  # fmt: skip
    assert specs[1].constexprs == {"n": 1, "BLOCK": 256}
    build_bundle(FOLDER / "recorded", [(spec, spec.archs[0]) for spec in specs])
    use_bundle(FOLDER / "recorded")
    knobs.set("launch.jit", "forbid")
    for call in (
        lambda: launcher[(1,)](x, y, out, 77, BLOCK=256),
        lambda: launcher[(1,)](*odd, 1, BLOCK=256),
        lambda: other[(1,)](x, y, out, 77, BLOCK=256),
    ):
        assert isinstance(call(), LoadedKernel)
    said(CompileError, lambda: launcher[(1,)](x, y, out, 96, BLOCK=256))


def a_recording_of_nothing_warns(cuda):
    x, y, out = three()
    text = (
        "record_specs: no kernel was recorded: no launch of an operator, or of a launcher of "
        "launch.prepare, reached a GPU here; those of kernel[grid] and of emulator.run are not "
        "seen. Try: run it on the GPU, outside emulator.run."
    )
    for launch in (lambda: None, lambda: add_kernel[(1,)](x, y, out, 77, BLOCK=256)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with record_specs() as specs:
                launch()
        assert specs == []
        assert [(str(w.message), w.filename) for w in caught] == [(text, __file__)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(KeyError), record_specs():
            raise KeyError("the block's own error stays alone")


def a_damaged_bundle_is_said(cuda):
    data = bytearray(PATH.read_bytes())
    at = data.index(b"\x7fELF")
    data[at + 9] ^= 1
    (FOLDER / "damaged").write_bytes(data)
    use_bundle(FOLDER / "damaged")
    x, y, out = three()
    text = said(BundleError, lambda: prepare(add_kernel)[(1,)](x, y, out, 77, BLOCK=1024))
    assert "is damaged: the binary of 'add[fp32]' is not what was written" in text
    said(BundleError, lambda: use_bundle(FOLDER / "nothing"))
    assert active_bundle().path == FOLDER / "damaged"


def the_key_of_a_launch_is_the_key_of_a_spec(cuda):
    """The one statement of it in `kernel_key`; said here once more to see that it is stable."""
    variant = load_bundle(PATH).kernel("add[fp32]").variants[0]
    assert variant.key == kernel_key(
        "tests.launch.bundle_kernels:add_kernel",
        variant.source,
        "sm_90",
        types={"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"},
        constants={"BLOCK": 1024},
        aligned=["x", "y", "out"],
        options={"num_warps": 4},
    )


CASES = (
    no_bundle_and_no_compiler,
    a_kernel_of_the_bundle_is_launched,
    it_is_given_what_a_compiled_one_is_given,
    alignment_chooses_the_kernel,
    what_is_not_there_is_compiled_where_that_is_allowed,
    descriptors,
    scratch_memory,
    hooks_want_tritons_own_path,
    the_plain_tier_is_tritons_own_path,
    another_source_is_another_kernel,
    the_bundle_of_the_environment,
    using_a_bundle_makes_launchers_look_again,
    what_a_program_launches_can_be_recorded_and_bundled,
    a_recording_of_nothing_warns,
    a_damaged_bundle_is_said,
    the_key_of_a_launch_is_the_key_of_a_spec,
)


def main():
    cuda = FakeCuda(FOLDER)
    results = {}
    for case in CASES:
        use_bundle(None)
        try:
            with knobs.scope({}):
                case(cuda)
            results[case.__name__] = ""
        except Exception:
            results[case.__name__] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
