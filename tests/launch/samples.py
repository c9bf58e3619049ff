"""Specs of the sample kernels, one for each thing that the compiler must report."""

from tileloom.launch.aot import KernelSpec

ALL = ("sm_80", "sm_90", "sm_100")
_MODULE = "tests.launch.kernel_samples"


def _portable(name, function, signature, constexprs, **more):
    types = {**signature, **dict.fromkeys(constexprs, "constexpr")}
    return KernelSpec(name, f"{_MODULE}:{function}", False, types, constexprs, ALL, **more)


def matmul(name="matmul", bm=128, bn=128, bk=64, **more):
    return _portable(
        name,
        "matmul_kernel",
        {"a": "*bf16", "b": "*bf16", "c": "*bf16", "k": "i32"},
        {"BM": bm, "BN": bn, "BK": bk},
        aligned=("a", "b", "c", "k"),
        **more,
    )


def wgmma(name="wgmma", n=128, stages=3, serial=False, **more):
    layout = {"swizzle_byte_width": 128, "element_bitwidth": 16, "rank": 2}
    constants = {"N": n, "NUM_STAGES": stages, "SERIAL": serial}
    return KernelSpec(
        name,
        f"{_MODULE}:wgmma_kernel",
        True,
        {
            "a_desc": "tensordesc<bf16[64, 64],{layout}>",
            "b_desc": f"tensordesc<bf16[{n}, 64],{{layout}}>",
            "out": "*fp32",
            "steps": "i32",
            **dict.fromkeys(constants, "constexpr"),
        },
        constants,
        ("sm_90",),
        layouts={"a_desc": layout, "b_desc": layout},
        **more,
    )


SCALE = _portable(
    "scale",
    "scale_kernel",
    {"x": "*fp32", "y": "*fp32", "n": "i64", "factor": "fp32"},
    {"BLOCK": 1024},
    aligned=("x", "y"),
)
MATMUL = matmul(num_warps=8)
SPILLS = matmul("spills", 128, 64, 32, num_warps=1, num_stages=1)
TOO_MUCH_SHARED = matmul("too_much_shared", 64, 64, 128, num_stages=7)
WGMMA = wgmma()
SERIALISED = wgmma("serialised", serial=True)
WRONG = _portable("wrong", "wrong_kernel", {"x": "*fp32"}, {})
ABORTS = KernelSpec("aborts", f"{_MODULE}:aborting_kernel", True, {"x": "*fp32"}, {}, ("sm_90",))
