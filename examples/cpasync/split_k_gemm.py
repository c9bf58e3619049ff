"""C += A B^T in float32 with K in parts: blocks add their parts to C by TMA's reduction.

For few tiles and a long K, where one block for each tile would leave most of the GPU idle. It is
`gemm.py` with another element type of C: a float32 C is added to, 32 columns at a time, by
`tma_reduce`; nothing waits for anybody. The order of the additions is not fixed, so the last bits
of C may differ from run to run.
"""

import gemm
import torch
from cute_support import counts, has_hopper


def parts(m, n, k, sms):
    """How many parts of K occupy the GPU, each of at least eight slices."""
    tiles = -(-m // gemm.TILE_M) * -(-n // gemm.TILE_N)
    return max(1, min(sms // tiles, k // (8 * gemm.TILE_K)))


def build(dtype=torch.float16, arch="sm_90a", options=""):
    """The compiled function and its PTX; no GPU is needed."""
    return gemm.build(dtype, torch.float32, arch, options)


def split_k_gemm(compiled, a, b):
    """Return A B^T in float32; A and B are contiguous, their rows multiples of 16 bytes."""
    (m, k), n = a.shape, b.shape[0]
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    c = torch.zeros(m, n, dtype=torch.float32, device=a.device)
    return gemm.gemm(compiled, a, b, c, parts(m, n, k, sms))


def main():
    compiled, ptx = build()
    print("split_k_gemm:", counts(ptx, *gemm.INSTRUCTIONS))
    if not has_hopper():
        print("compiled for sm_90a; not run: no Hopper GPU here")
        return
    device = torch.device("cuda")
    for m, n, k in ((128, 256, 65536), (100, 200, 10_000), (512, 512, 16384)):
        a, b = torch.randn(m, k, device=device).half(), torch.randn(n, k, device=device).half()
        c = split_k_gemm(compiled, a, b)
        error = (c.double() - a.double() @ b.double().T).abs().max().item()
        print(f"{m} x {n} x {k}: off by {error:.1e}")


if __name__ == "__main__":
    main()
