"""TileLang as a client: it generates kernels for its CuTe DSL target, with no GPU.

It is looked for in the environment, else in `.tilelang/site` (docs/cpasync_tilelang.md says how to
put it there). `python -m tests.cpasync.tilelang_client` writes what it generates to
`generated.json`; with a folder it also compiles every kernel into it, for a GPU machine, and their
PTX into `generated_ptx.json.gz`.
"""

from __future__ import annotations

import dataclasses
import gzip
import importlib
import importlib.util
import json
import sys
from base64 import b64decode, b64encode
from pathlib import Path

from tests.cpasync.conftest import find_cute
from tests.house import ROOT
from tileloom.cpasync.cubin import Cubin
from tileloom.cpasync.tilelang_kernel import GeneratedKernel

FOLDER = ROOT / ".tilelang" / "site"
SAVED = Path(__file__).with_name("generated.json")
PLAYED = Path(__file__).with_name("generated_ptx.json.gz")
NAMESPACES = {"ours": "tileloom.cpasync.tilelang", "theirs": "tilelang.contrib.cutedsl"}
TYPES = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "int32": "*i32"}


def find_tilelang() -> bool:
    """Whether TileLang and the CuTe DSL can be imported."""
    if importlib.util.find_spec("tilelang") is None and FOLDER.is_dir():
        sys.path.append(str(FOLDER))
        importlib.invalidate_caches()
    return find_cute() and importlib.util.find_spec("tilelang") is not None


@dataclasses.dataclass(frozen=True)
class MapFacts:
    """One TMA descriptor as TileLang's host code asks the driver for it: its numbers, its order."""

    tensor: str
    kind: int
    sizes: list[int]
    pitches: list[int]
    box: list[int]
    steps: list[int]
    modes: list[int]


@dataclasses.dataclass(frozen=True)
class Generated:
    kernel: GeneratedKernel
    maps: dict[str, MapFacts]
    arch: str

    @classmethod
    def of(cls, kept):
        kernel = kept["kernel"] | {"grid": tuple(kept["kernel"]["grid"])}
        maps = {name: MapFacts(**facts) for name, facts in kept["maps"].items()}
        return cls(GeneratedKernel(**kernel), maps, kept["arch"])


def saved() -> dict[str, Generated]:
    """What TileLang 0.1.15 generated, by the program's name."""
    return {name: Generated.of(kept) for name, kept in json.loads(SAVED.read_text()).items()}


def _gemm(T, stages, m=512, n=512, k=512, tile_m=128, tile_n=128, tile_k=64, dtype="float16"):
    @T.prim_func
    def gemm(A: T.Tensor((m, k), dtype), B: T.Tensor((k, n), dtype), C: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, tile_n), T.ceildiv(m, tile_m), threads=128) as (bx, by):
            a = T.alloc_shared((tile_m, tile_k), dtype)
            b = T.alloc_shared((tile_k, tile_n), dtype)
            c = T.alloc_shared((tile_m, tile_n), dtype)
            acc = T.alloc_fragment((tile_m, tile_n), "float32")
            T.clear(acc)
            for i in T.Pipelined(T.ceildiv(k, tile_k), num_stages=stages):
                T.copy(A[by * tile_m, i * tile_k], a)
                T.copy(B[i * tile_k, bx * tile_n], b)
                T.gemm(a, b, acc)
            T.copy(acc, c)
            T.copy(c, C[by * tile_m, bx * tile_n])

    return gemm


def _copy(T, m=512, n=512, tile=64, dtype="float16"):
    @T.prim_func
    def copy(A: T.Tensor((m, n), dtype), C: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, tile), T.ceildiv(m, tile), threads=128) as (bx, by):
            a = T.alloc_shared((tile, tile), dtype)
            T.copy(A[by * tile, bx * tile], a)
            T.copy(a, C[by * tile, bx * tile])

    return copy


def _vector(T, n=4096, tile=128, dtype="float16"):
    @T.prim_func
    def vector(A: T.Tensor((n,), dtype), C: T.Tensor((n,), dtype)):
        with T.Kernel(n // tile, threads=128) as bx:
            a = T.alloc_shared((tile,), dtype)
            T.copy(A[bx * tile], a)
            T.copy(a, C[bx * tile])

    return vector


def _evict_first(T, m=512, n=512, tile=64, dtype="float16"):
    @T.prim_func
    def evict_first(A: T.Tensor((m, n), dtype), C: T.Tensor((m, n), dtype)):
        with T.Kernel(n // tile, m // tile, threads=128) as (bx, by):
            a = T.alloc_shared((tile, tile), dtype)
            T.copy(A[by * tile, bx * tile], a)
            T.copy(a, C[by * tile, bx * tile], eviction_policy="evict_first")

    return evict_first


def _row_sums(T, m=256, n=512, tile=32, dtype="float32"):
    @T.prim_func
    def row_sums(A: T.Tensor((m, n), dtype), C: T.Tensor((m,), dtype)):
        with T.Kernel(T.ceildiv(m, tile), threads=128) as bx:
            a = T.alloc_fragment((tile, n), dtype)
            total = T.alloc_fragment((tile,), dtype)
            T.copy(A[bx * tile, 0], a)
            T.reduce_sum(a, total, dim=1)
            T.copy(total, C[bx * tile])

    return row_sums


def _split_k(T, m=128, n=128, k=512, tile=64, tile_k=32, splits=4, dtype="float16"):
    @T.prim_func
    def split_k(
        A: T.Tensor((m, k), dtype), B: T.Tensor((k, n), dtype), C: T.Tensor((m, n), "float32")
    ):
        with T.Kernel(T.ceildiv(n, tile), T.ceildiv(m, tile), splits, threads=128) as (bx, by, bz):
            a = T.alloc_shared((tile, tile_k), dtype)
            b = T.alloc_shared((tile_k, tile), dtype)
            c = T.alloc_shared((tile, tile), "float32")
            acc = T.alloc_fragment((tile, tile), "float32")
            T.clear(acc)
            for i in T.Pipelined(k // tile_k // splits, num_stages=2):
                T.copy(A[by * tile, bz * (k // splits) + i * tile_k], a)
                T.copy(B[bz * (k // splits) + i * tile_k, bx * tile], b)
                T.gemm(a, b, acc)
            T.copy(acc, c)
            T.atomic_add(C[by * tile, bx * tile], c, use_tma=True)

    return split_k


PROGRAMS = {
    "gemm": lambda T: _gemm(T, stages=0),
    "pipelined_gemm": lambda T: _gemm(T, stages=3),
    "copy": _copy,
    "row_sums": _row_sums,
    # Its store has one coordinate, which TileLang prints as a number, not as a tuple.
    "vector": _vector,
    "evict_first": _evict_first,
    "split_k": _split_k,
    # Rows of 1000 bytes: predicated cp.async, and a last step in K that is not whole.
    "tails": lambda T: _gemm(T, 2, 500, 500, 500, 64, 64, 32),
}
# For scripts/time_tilelang.py: A, B and C are square.
TIMED = {
    "pipelined_gemm 4096": lambda T: _gemm(T, 3, 4096, 4096, 4096),
    "tails 4100": lambda T: _gemm(T, 3, 4100, 4100, 4100, 128, 128, 32),
}
# What TileLang generates of it for sm_90 its own namespace refuses too: an address is a tensor.
ARCHS = {"tails": "sm_80"}
# What the binaries are for, whatever was generated: sm_80's run on no other generation.
GPU = "sm_90a"
# Generated by TileLang, and refused by its own namespace: with these words.
REFUSED_BY_THEIRS = {
    "vector": "tma_store(size) path is only implemented for sm_90/sm_90a",
    "evict_first": "tma_store() got an unexpected keyword argument 'eviction_kind'",
}


def generate(name: str) -> Generated:
    """Let TileLang generate a kernel; its text, and what its host code knows."""
    arch = ARCHS.get(name.split()[0], "sm_90a")
    tilelang = importlib.import_module("tilelang")
    T = importlib.import_module("tilelang.language")
    determine = importlib.import_module("tilelang.backend.target").determine_target
    target = determine({"kind": "cutedsl", "arch": arch}, return_object=True)
    with target:
        made = tilelang.lower((PROGRAMS | TIMED)[name](T), target=target)
    ((symbol, device),) = made.device_mod.functions.items()
    ((_, host),) = made.host_mod.functions.items()
    maps = {}
    for desc, said in host.attrs["tma_descriptor_args"].items():
        _, _, kind, rank, tensor, *rest = said
        kind, rank, rest = int(kind), int(rank), [int(n) for n in rest]
        parts = [rest[i * rank : (i + 1) * rank] for i in range(4)]
        maps[desc.name] = MapFacts(
            tensor.name, kind, parts[0], parts[1][1:], parts[2], parts[3], rest[4 * rank :]
        )
    extent = {k: int(v) for k, v in device.attrs["thread_extent"].items()}
    parameters = {
        p.name: "nvTmaDesc" if p.name in maps else TYPES[str(p.type_annotation.element_type.dtype)]
        for p in device.params
    }
    kernel = GeneratedKernel(
        made.kernel_source, symbol.name_hint, parameters,
        tuple(extent.get(f"blockIdx.{axis}", 1) for axis in "xyz"), extent["threadIdx.x"],
        int(device.attrs.get("dyn_shared_memory_buf", 0)),
    )  # fmt: skip
    return Generated(kernel, maps, arch)


def compile_all(folder: Path) -> None:
    """Write every kernel, compiled with our functions and with TileLang's, as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {}
    for name, made in saved().items():
        found = {}
        for whose, namespace in NAMESPACES.items():
            if whose == "theirs" and name in REFUSED_BY_THEIRS:
                continue
            cubin = dataclasses.asdict(made.kernel.compile(GPU, namespace=namespace))
            found[whose] = cubin | {"code": b64encode(cubin["code"]).decode()}
        (folder / f"{name}.json").write_text(json.dumps(found))
        texts[name] = {whose: cubin["ptx"] for whose, cubin in found.items()}
        if texts[name]["ours"] == texts[name].get("theirs"):
            del texts[name]["theirs"]
    PLAYED.write_bytes(gzip.compress(json.dumps(texts).encode(), 9, mtime=0))


def saved_ptx() -> dict[str, dict[str, str]]:
    """The PTX of every kernel on our copies, and on TileLang's where that differs."""
    return json.loads(gzip.decompress(PLAYED.read_bytes()))


def load_cubin(folder: Path, name: str, whose: str) -> Cubin:
    """Read back what `compile_all` wrote."""
    kept = json.loads((folder / f"{name}.json").read_text())[whose]
    sizes = tuple(kept["parameter_bytes"])
    return Cubin(**kept | {"code": b64decode(kept["code"]), "parameter_bytes": sizes})


if __name__ == "__main__":
    assert find_tilelang(), "TileLang and the CuTe DSL are needed"
    everything = {name: dataclasses.asdict(generate(name)) for name in PROGRAMS}
    SAVED.write_text(json.dumps(everything, indent=1) + "\n")
    if len(sys.argv) > 1:
        compile_all(Path(sys.argv[1]))
