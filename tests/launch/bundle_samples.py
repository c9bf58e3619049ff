"""What the bundle tests compile: specs, and the bundle that a GPU machine is given.

`tileloom bundle build FILE --from tests.launch.bundle_samples:for_gpu` builds the latter, here.
"""

import dataclasses

from tests.launch import samples

from tileloom.cli.inspect import select, shipped_specs
from tileloom.launch.aot import KernelSpec

_MODULE = "tests.launch.bundle_kernels"

SCALARS = {
    "a": "u1", "b": "i8", "c": "u8", "d": "i16", "e": "i32", "f": "u32", "g": "i64", "h": "u64",
    "i": "fp32", "j": "fp64", "k": "bf16",
}  # fmt: skip


def add(name, element, aligned, archs=samples.ALL, block=1024):
    pointers = ("x", "y", "out")
    signature = {**dict.fromkeys(pointers, f"*{element}"), "n": "i32", "BLOCK": "constexpr"}
    given = pointers if aligned else ()
    function = f"{_MODULE}:add_kernel"
    return KernelSpec(name, function, False, signature, {"BLOCK": block}, archs, aligned=given)


ADD = add("add[fp32]", "fp32", aligned=True)
ADD_ANY = add("add[fp32-any]", "fp32", aligned=False)
ADD_HALF = add("add[fp16]", "fp16", aligned=True)
MANY = KernelSpec(
    "scalars",
    f"{_MODULE}:scalars_kernel",
    False,
    {
        "out": "*fp64",
        **SCALARS,
        **dict.fromkeys(("absent", "one", "MODE"), "constexpr"),
    },
    {"absent": None, "one": 1, "MODE": "twelve"},
    samples.ALL,
    aligned=("out",),
)
SCRATCH = KernelSpec(
    "scratch",
    f"{_MODULE}:scratch_kernel",
    False,
    {"x": "*fp32", "out": "*fp32", "BLOCK": "constexpr"},
    {"BLOCK": 32},
    ("sm_90",),
    aligned=("x", "out"),
)

SMALL = [
    (ADD, "sm_90"),
    (ADD_ANY, "sm_90"),
    (ADD_HALF, "sm_90"),
    (ADD, "sm_80"),
    (MANY, "sm_90"),
    (SCRATCH, "sm_90"),
    (samples.WGMMA, "sm_90"),
]
"""What tests without a GPU compile."""

SHIPPED = (
    "attention_fwd_gluon_sm90[d128-causal-bf16]",
    "attention_fwd_gluon_sm90[d64-full-bf16]",
    "norm_fwd[n4096-rms-bf16-*",
    "softmax_fwd_triton[4096-bf16]",
)


def without_gradients(norm):
    """The form of a shipped norm that a call without gradients and with a bf16 weight takes."""
    absent = dict.fromkeys(("rstd", "r_2"))
    return dataclasses.replace(
        norm,
        name=norm.name.replace("norm_fwd[", "norm_fwd[inference-"),
        signature={**norm.signature, "weight": "*bf16", **dict.fromkeys(absent, "constexpr")},
        constexprs={**norm.constexprs, **absent},
        aligned=tuple(name for name in norm.aligned if name not in absent),
    )


def for_gpu():
    """What the tests on a GPU launch, for sm_90, and one kernel that is for another GPU."""
    shipped = select(shipped_specs(), SHIPPED)
    norms = [without_gradients(spec) for spec in shipped if spec.name.startswith("norm_fwd[")]
    specs = [ADD, ADD_ANY, ADD_HALF, MANY, SCRATCH, *shipped, *norms]
    other = dataclasses.replace(ADD, name="older", archs=("sm_80",))
    return [*(dataclasses.replace(spec, archs=("sm_90",)) for spec in specs), other]
