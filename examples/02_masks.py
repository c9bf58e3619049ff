"""Masks that are values.

A mask of `tileloom.masks` says which keys a query may see without a tensor of all pairs: a
diagonal band, and a number of keys for each sequence. `&` puts them together.
"""

import torch

import tileloom
from tileloom import masks


def picture(mask, batch, len_q, len_k):
    """Draw a mask of each sequence: # is a key that the query in this row sees."""
    shown = mask.materialize(batch, len_q, len_k).expand(batch, 1, len_q, len_k)
    rows = ["   ".join("".join(".#"[int(x)] for x in row) for row in rows)
            for rows in shown[:, 0].transpose(0, 1).tolist()]  # fmt: skip
    return "\n".join(f"    {row}" for row in rows)


def main():
    torch.manual_seed(0)

    # Causal: with as many queries as keys there is one diagonal. With more keys than queries it
    # matters where the diagonal starts: at the first key, as in PyTorch's `is_causal=True`, or so
    # that the last query sees the last key, as when new tokens follow a cache.
    print("causal, from the top left and from the bottom right:")
    print(picture(masks.causal(), 1, 3, 6))
    print()
    print(picture(masks.causal("bottom_right"), 1, 3, 6))

    # A padded batch: the second sequence has four keys. From the bottom right each sequence has
    # its own diagonal, which ends at its own last key.
    lengths = torch.tensor([6, 4])
    padded = masks.causal("bottom_right") & masks.key_lengths(lengths)
    print("causal to the bottom right, with 6 and 4 keys:")
    print(picture(padded, 2, 3, 6))

    # A sliding window of three keys, the query's own included.
    window = masks.window(2, 0)
    print("a window:")
    print(picture(window, 1, 6, 6))

    # The value and the tensor that it stands for give the same result; only the value needs no
    # memory, and only the value reaches the Hopper kernel.
    q, k, v = torch.randn(3, 2, 4, 6, 16)
    mask = window & masks.key_lengths(lengths)
    by_value = tileloom.attention(q, k, v, mask=mask)
    by_tensor = tileloom.attention(q, k, v, mask=mask.materialize(2, 6, 6))
    assert torch.equal(by_value, by_tensor)

    # What no query sees may hold anything: padding is selected away, never multiplied.
    k[1, :, 4:] = v[1, :, 4:] = float("nan")
    assert torch.equal(tileloom.attention(q, k, v, mask=mask), by_value)

    # A query that sees no key gives 0, and minus infinity as its log-sum-exp.
    nothing = masks.key_lengths(torch.tensor([6, 0]))
    out, lse = tileloom.attention(q, k, v, mask=nothing, return_lse=True)
    print(f"without keys: output {out[1].abs().max():.0f}, log-sum-exp {lse[1].max():.0f}")
    assert out[1].abs().max() == 0
    assert (lse[1] == -torch.inf).all()


if __name__ == "__main__":
    main()
