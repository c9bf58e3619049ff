"""The kernels of test_gpu.py as binaries: the examples', and the probes'.

`python -m tests.cpasync.gpu_cubins` compiles them all into `.cute-cubins`, with no GPU.
"""

from __future__ import annotations

import importlib
import re

from tests.cpasync import examples
from tests.cpasync.conftest import find_cute
from tests.cpasync.test_probes import BOXES, COPIES, REDUCTIONS, SWIZZLES
from tests.house import ROOT

FOLDER = ROOT / ".cute-cubins"
POLICIES = (None, "normal", "first", "last", "fraction")
# Of multicast loads: which blocks of the cluster receive the slice of each.
MASKS = {
    "2": (0b11, 0b11),
    "2-exchange": (0b10, 0b01),
    "4": (0b1111,) * 4,
    "4-some": (0b0001, 0b0110, 0b1000, 0b0101),
    "8": (0b11111111,) * 8,
}


def _copy(size, how):
    import cutlass

    from tests.cpasync import probes

    kinds = cutlass.Float32, cutlass.Float32, cutlass.Int32
    arguments = [probes.memory(kind) for kind in kinds]
    return _binary(probes.copy_probe, [*arguments, size, how], ("*fp32", "*fp32", "*i32"))


def _box(dtype, shape, box, crd, swizzle="none", op=None):
    import cutlass

    from tests.cpasync import probes

    pointer = probes.memory(getattr(cutlass, dtype))
    coordinates = tuple(cutlass.Int32(c) for c in reversed(crd))
    arguments = [pointer, pointer, coordinates, shape, box, swizzle, op]
    types = ("nvTmaDesc",) * 2 + ("i32",) * len(crd)
    name = "none" if swizzle == "none" else swizzle[1:].upper()
    return _binary(probes.box_probe, arguments, types, boxes=(box, box), swizzle=name)


def _wait():
    import cutlass

    from tests.cpasync import probes

    arguments = [probes.memory(cutlass.Int32), cutlass.Int32(1)]
    return _binary(probes.wait_probe, arguments, ("*i32", "i32"))


def _im2col(rank, box_bytes):
    import cutlass

    from tests.cpasync import probes_sm90

    zeros = [(cutlass.Int32(0),) * n for n in (rank, rank - 2)]
    types = ("nvTmaDesc",) * 2 + ("i32",) * (2 * rank - 2)
    return _binary(probes_sm90.im2col_probe, [*zeros, box_bytes], types)


def _bulk(policy):
    import cutlass

    from tests.cpasync import probes, probes_sm90
    from tileloom import cpasync

    if policy == "fraction":
        policy = cpasync.cache_policy("last", 0.5, "first")
    memory = [probes.memory(cutlass.Float32)] * 2
    arguments = [*memory, cutlass.Int32(16), policy]
    return _binary(probes_sm90.bulk_probe, arguments, ("*fp32", "*fp32", "i32"))


# A number of each type that a kernel takes.
NUMBERS = {
    "i1": True, "i8": -100, "u8": 200, "i16": -30000, "u16": 60000, "i32": -(2**31),
    "u32": 2**32 - 1, "i64": -(2**52), "u64": 2**52, "fp16": 0.333251953125, "fp32": -1.5,
    "fp64": 1 / 3,
}  # fmt: skip
_NAMES = {"i": "Int", "u": "Uint", "fp": "Float"}


def _numbers():
    import cutlass

    from tests.cpasync import probes, probes_sm90

    kinds = [re.fullmatch(r"([a-z]+)(\d+)", kind).groups() for kind in NUMBERS]
    names = ["Boolean" if bits == "1" else _NAMES[sort] + bits for sort, bits in kinds]
    values = tuple(getattr(cutlass, name)(0) for name in names)
    arguments = [probes.memory(cutlass.Float64), values]
    return _binary(probes_sm90.numbers_probe, arguments, ("*fp64", *NUMBERS))


def _raw(rank):
    import cutlass

    from tests.cpasync import probes, probes_sm90

    zero = cutlass.Int32(0)
    arguments = [probes.memory(cutlass.Int32), zero, (zero,) * rank]
    types = ("nvTmaDesc", "*i32", "i32", *("i32",) * rank)
    return _binary(probes_sm90.raw_probe, arguments, types)


def _im2col_store(op):
    import cutlass

    from tests.cpasync import probes_sm90

    arguments = [(cutlass.Int32(0),) * 4, 64 * 64 * 2, op]
    types = ("nvTmaDesc",) * 2 + ("i32",) * 4
    return _binary(probes_sm90.im2col_store_probe, arguments, types)


def _table(as_tensor):
    import cutlass

    from tests.cpasync import probes, probes_sm90

    memory = [probes.memory(cutlass.Uint64, align=64), probes.memory(cutlass.Float16)]
    arguments = [*memory, cutlass.Int32(0), as_tensor]
    return _binary(probes_sm90.table_probe, arguments, ("*u64", "*fp16", "i32"))


def _checked():
    import cutlass

    from tests.cpasync import probes, probes_sm90
    from tileloom.cpasync.cubin import compile_cubin

    arguments = [*[probes.memory(cutlass.Float32)] * 2, cutlass.Int32(0)]
    cubin = compile_cubin(
        probes_sm90.checked_probe, *arguments, arch="sm_90a", options="--enable-assertions"
    )
    return examples.load("cubins").Binary(cubin, ("*fp32", "*fp32", "i32"))


def _sm90(name, memories, types, *options):
    import cutlass

    from tests.cpasync import probes, probes_sm90

    memory = [probes.memory(getattr(cutlass, kind)) for kind in memories]
    return _binary(getattr(probes_sm90, name), [*memory, *options], types)


def _binary(function, arguments, types, **known):
    from tileloom.cpasync.cubin import compile_cubin

    cubin = compile_cubin(function, *arguments, arch="sm_90a")
    return examples.load("cubins").Binary(cubin, types, **known)


def _swizzled(name, swizzle):
    shape, box, crd = BOXES[name]
    return "Float16", shape, (*box[:-1], min(box[-1], SWIZZLES[swizzle])), crd, swizzle


PROBES = {
    **{f"probe-copy-{size}-{how}": (_copy, size, how) for size, how in COPIES},
    **{
        f"probe-box-{name}-{swizzle}": (_box, *_swizzled(name, swizzle))
        for name in BOXES
        for swizzle in SWIZZLES
    },
    **{
        f"probe-reduce-{dtype}-{op}": (_box, dtype, (16, 16), (8, 16), (0, 0), "none", op)
        for dtype, op in REDUCTIONS
    },
    "probe-wait": (_wait,),
    **{f"probe-im2col-{rank}": (_im2col, rank, 64 * 64 * 2) for rank in (3, 4, 5)},
    **{f"probe-im2col-store-{op}": (_im2col_store, op) for op in (None, "add")},
    "probe-form-atom": (_sm90, "atom_probe", ("Float16",) * 2, ("nvTmaDesc", "*fp16")),
    "probe-form-pointer": (_table, False),
    "probe-form-tensor": (_table, True),
    "probe-checked": (_checked,),
    "probe-numbers": (_numbers,),
    **{f"probe-raw-{rank}": (_raw, rank) for rank in range(1, 6)},
    **{f"probe-bulk-{policy}": (_bulk, policy) for policy in POLICIES},
    "probe-arrivals": (_sm90, "arrivals_probe", ("Float32",) * 2, ("*fp32",) * 2),
    **{
        f"probe-multicast-{kind}-{name}": (
            _sm90, "multicast_probe", ("Float32",) * 2, ("nvTmaDesc", "*fp32", "*fp32"), masks,
            kind == "bulk",
        )
        for name, masks in MASKS.items()
        for kind in ("box", "bulk")
    },
    **{
        f"probe-remote-{blocks}": (_sm90, "remote_probe", ("Int32",), ("*i32",), blocks)
        for blocks in (2, 4, 8)
    },
}  # fmt: skip


def made(name):
    """Compile one."""
    if name in PROBES:
        function, *arguments = PROBES[name]
        return function(*arguments)
    return examples.load("cubins").compile_kernel_of(name)


def find(name):
    """Read one from the folder, else compile it; None where neither can be done."""
    path = FOLDER / f"{name}.json"
    if path.exists():
        return examples.load("cubins").Binary.load(path)
    return made(name) if find_cute() else None


if __name__ == "__main__":
    assert find_cute(), "the CuTe DSL is needed: make test puts it into .cute-dsl"
    importlib.import_module("cutlass")
    FOLDER.mkdir(exist_ok=True)
    names = [*PROBES, *examples.load("cubins").KERNELS]
    for each in names:
        made(each).save(FOLDER / f"{each}.json")
    print(f"{len(names)} kernels in {FOLDER}")
