"""The kernels of this folder as binaries: compiled where the DSL is, launched where it is not.

python examples/cpasync/cubins.py FOLDER    # compiles them all, with no GPU

The files need only tileloom and PyTorch to run: descriptors are `tileloom.cpasync.TensorMap`, and
the driver launches the rest.
"""

import json
import sys
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tileloom.cpasync.cubin import Cubin, compile_cubin
from tileloom.cpasync.tensormap import TensorMap


@dataclass(frozen=True)
class Binary:
    """A compiled kernel with what its launch needs to know.

    Attributes:
        cubin: The kernel.
        types: Of its parameters.
        shared_bytes: Dynamic shared memory of a block.
        boxes: Of its descriptors, which come first among the parameters.
        swizzle: Of the same.
    """

    cubin: Cubin
    types: tuple[str, ...]
    shared_bytes: int = 0
    boxes: tuple[tuple[int, ...], ...] = ()
    swizzle: str = "none"

    def save(self, path):
        """Write everything to a file."""
        kept = asdict(self)
        kept["cubin"]["code"] = b64encode(self.cubin.code).decode()
        path.write_text(json.dumps(kept))

    @classmethod
    def load(cls, path):
        """Read what `save` wrote."""
        kept = json.loads(path.read_text())
        cubin = kept["cubin"]
        cubin["parameter_bytes"] = tuple(cubin["parameter_bytes"])
        kept["cubin"] = Cubin(**cubin | {"code": b64decode(cubin["code"])})
        for name in ("types", "boxes"):
            kept[name] = tuple(tuple(v) if isinstance(v, list) else v for v in kept[name])
        return cls(**kept)

    def prepare(self, blocks, matrices, *arguments):
        """Encode the descriptors and load the kernel; what is returned launches it."""
        device = torch.cuda.current_device()
        launch = self.cubin.launcher(
            self.types, grid=(blocks, 1, 1), shared_bytes=self.shared_bytes, device=device
        )
        maps = [
            TensorMap.tiled(m, box, swizzle=self.swizzle) for m, box in zip(matrices, self.boxes)
        ]
        stream = torch.cuda.current_stream().cuda_stream
        return lambda: launch(stream, *maps, *arguments)


def sms():
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def prepare_axpby(binary, alpha, x, beta, y, z, blocks=None, chunk=1024, stages=4):
    blocks = blocks or max(1, -(-x.numel() // (stages * chunk)))
    return binary.prepare(blocks, (), x, y, z, x.numel(), alpha, beta)


def prepare_copy(binary, source, target, blocks=None):
    rows, columns = binary.boxes[0]
    across, down = -(-source.shape[1] // columns), -(-source.shape[0] // rows)
    stages = binary.shared_bytes // (rows * columns * source.itemsize + 8)
    blocks = min(across * down, blocks or -(-across * down // stages))
    return binary.prepare(blocks, (source, target), across, across * down)


def prepare_gemm(binary, a, b, c, splits=1):
    (tile_m, tile_k), (tile_n, _), _ = binary.boxes
    (m, k), n = a.shape, b.shape[0]
    tiles_m, tiles_n, slices = -(-m // tile_m), -(-n // tile_n), -(-k // tile_k)
    blocks = min(tiles_m * tiles_n * splits, sms())
    return binary.prepare(blocks, (a, b, c), tiles_m, tiles_n, slices, splits)


def parts(m, n, k):
    """How many parts of K occupy the GPU, each of at least eight slices."""
    return max(1, min(sms() // (-(-m // 128) * -(-n // 256)), k // 512))


def compile_axpby(size=16, modifier="cg"):
    import axpby
    import cutlass
    from cute_support import example_pointer

    any_of = [example_pointer(torch.float32)] * 3
    numbers = cutlass.Int64(1), cutlass.Float32(1), cutlass.Float32(1), cutlass.Int32(1)
    made = compile_cubin(axpby.launch, *any_of, *numbers, size, modifier, arch="sm_90a")
    return Binary(made, ("*fp32",) * 3 + ("i64", "fp32", "fp32"))


def compile_copy(rows=8, row_bytes=512, stages=4, read=True):
    import cutlass
    import tma_copy
    from cute_support import example_pointer

    ring = tma_copy.Ring(rows, row_bytes, stages, read)
    int32, int64 = cutlass.Int32(1), cutlass.Int64(1)
    arguments = [example_pointer(torch.float16)] * 2 + [int32] * 2 + [int64] * 2 + [int32, ring]
    made = compile_cubin(tma_copy.launch, *arguments, arch="sm_90a")
    boxes = ((rows, row_bytes // 2),) * 2
    shared = ring.bytes + 8 * stages
    return Binary(made, ("nvTmaDesc",) * 2 + ("i32",) * 2, shared, boxes)


def compile_gemm(dtype, out_dtype):
    import cutlass
    import gemm
    from cute_support import example_pointer

    arguments = [example_pointer(d) for d in (dtype, dtype, out_dtype)] + [cutlass.Int32(1)] * 5
    made = compile_cubin(gemm.launch, *arguments, arch="sm_90a")
    columns = gemm.ROW_BYTES // out_dtype.itemsize
    boxes = (gemm.TILE_M, gemm.TILE_K), (gemm.TILE_N, gemm.TILE_K), (64, columns)
    types = ("nvTmaDesc",) * 3 + ("i32",) * 4
    return Binary(made, types, gemm.SHARED_BYTES, boxes, "128B")


RINGS = [
    (rows, row_bytes, stages, read)
    for rows, row_bytes in ((4, 512), (8, 512), (32, 512), (128, 128))
    for stages in (2, 4, 8)
    for read in (True, False)
]
# Every kernel by its name.
KERNELS = {
    **{
        f"axpby-{size}-{modifier}": (compile_axpby, size, modifier)
        for size, modifier in ((16, "cg"), (16, "ca"), (8, "ca"), (4, "ca"))
    },
    **{
        f"copy-{rows}x{row_bytes}-{stages}-{'read' if read else 'full'}": (
            compile_copy, rows, row_bytes, stages, read,
        )
        for rows, row_bytes, stages, read in RINGS
    },
    "gemm-float16": (compile_gemm, torch.float16, torch.float16),
    "gemm-bfloat16": (compile_gemm, torch.bfloat16, torch.bfloat16),
    "split_k-float16": (compile_gemm, torch.float16, torch.float32),
}  # fmt: skip


def compile_kernel_of(name):
    """Compile one of KERNELS."""
    function, *arguments = KERNELS[name]
    return function(*arguments)


def main():
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/cpasync/cubins.py FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in KERNELS:
        compile_kernel_of(name).save(folder / f"{name}.json")
    print(f"{len(KERNELS)} kernels in {folder}")


if __name__ == "__main__":
    main()
