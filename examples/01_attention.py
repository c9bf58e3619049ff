"""Attention, and who computes it.

`tileloom.attention` takes what `scaled_dot_product_attention` takes. Which backend runs follows
from the tensors: a Hopper kernel, a portable Triton kernel, or the formula in plain PyTorch. This
example runs anywhere; on a machine with a GPU it takes that.
"""

import torch

import tileloom
from tileloom.ops import record_choices
from tileloom.ops.attention.reference import attention_reference
from tileloom.testing import assert_accurate


def main():
    device = torch.device(torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    # Queries are `[B, Hq, Lq, D]`, keys and values `[B, Hkv, Lk, D]`. Eight query heads share two
    # key heads here: nothing is repeated in memory. The tensors are views of `[B, L, H, D]`, as a
    # model's projections give them: nothing is copied either.
    q = torch.randn(2, 100, 8, 64, device=device, dtype=torch.float16).transpose(1, 2)
    k = torch.randn(2, 120, 2, 64, device=device, dtype=torch.float16).transpose(1, 2)
    v = torch.randn(2, 120, 2, 64, device=device, dtype=torch.float16).transpose(1, 2)

    with record_choices() as choices:
        out, lse = tileloom.attention(q, k, v, return_lse=True)
    print(f"output {tuple(out.shape)}, log-sum-exp {tuple(lse.shape)} in {lse.dtype}")

    # The decision is recorded with its reasons; nothing falls back silently.
    (choice,) = choices
    print(f"computed by {choice.backend}, decided by {choice.source}: {choice.config}")
    for backend, reasons in choice.refused.items():
        print(f"  {backend} refused: {'; '.join(reasons)}")

    # Is it right? The accuracy rule has no tolerance to pick: the truth is the same formula in
    # float64, the yardstick is the same formula in float16, and a kernel may be hardly worse.
    truth = attention_reference(q, k, v, compute_dtype=torch.float64)
    baseline = attention_reference(q, k, v, compute_dtype=torch.float16)
    assert_accurate(out, truth, baseline)
    print(f"largest error: ours {(out - truth).abs().max():.1e}, plain float16 "
          f"{(baseline - truth).abs().max():.1e}")  # fmt: skip

    # The log-sum-exp puts attention over pieces of the keys together again.
    parts = [
        tileloom.attention(q, k[:, :, cut], v[:, :, cut], return_lse=True)
        for cut in (slice(0, 70), slice(70, 120))
    ]
    weights = torch.softmax(torch.stack([part_lse for _, part_lse in parts]), 0)
    joined = sum(w[..., None] * part.float() for w, (part, _) in zip(weights, parts, strict=True))
    print(f"from two pieces: off by {(joined - out.float()).abs().max():.1e}")
    assert (joined - out.float()).abs().max() < 2e-3

    # A wrong call gets a sentence.
    try:
        tileloom.attention(q, k[:, :1].expand(-1, 3, -1, -1), v)
    except tileloom.errors.ShapeError as error:
        print(f"ShapeError: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
