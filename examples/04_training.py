"""A small decoder, trained: attention and the row-wise operators with their gradients.

The model is what many today's decoders are made of: RMS norms with the residual stream fused in,
grouped heads, SwiGLU, and a cross entropy whose gradient takes the place of the logits. It learns
to count modulo 16. This example runs anywhere; on a machine with a GPU it takes that.
"""

import torch

import tileloom

CLASSES, WIDTH, HEADS, KEY_HEADS = 16, 64, 4, 2


class Block(torch.nn.Module):
    """One layer: attention and a gated linear unit, each behind its norm."""

    def __init__(self):
        super().__init__()
        size = WIDTH // HEADS
        self.norms = torch.nn.Parameter(torch.ones(2, WIDTH))
        self.q = torch.nn.Linear(WIDTH, HEADS * size, bias=False)
        self.kv = torch.nn.Linear(WIDTH, 2 * KEY_HEADS * size, bias=False)
        self.out = torch.nn.Linear(HEADS * size, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x, stream):
        """Return what is to be added to the residual stream next, and the stream."""
        # Each norm adds its input to the residual stream first, in the same pass over memory.
        x, stream = tileloom.rms_norm(x, self.norms[0], residual=stream)
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, KEY_HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = tileloom.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x, stream = tileloom.rms_norm(self.out(x), self.norms[1], residual=stream)
        gate, up = self.up(x).chunk(2, -1)
        return self.down(tileloom.swiglu(gate, up)), stream


class Decoder(torch.nn.Module):
    """Tokens `[B, L]` to logits `[B, L, CLASSES]`."""

    def __init__(self, depth=2):
        super().__init__()
        self.embedding = torch.nn.Embedding(CLASSES, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(depth))
        self.norm = torch.nn.Parameter(torch.ones(WIDTH))
        self.head = torch.nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens):
        """Return the logits of what follows each token."""
        stream = self.embedding(tokens)
        x = torch.zeros_like(stream)
        for block in self.blocks:
            x, stream = block(x, stream)
        x, _ = tileloom.rms_norm(x, self.norm, residual=stream)
        return self.head(x)


def main():
    device = torch.device(torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Decoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = torch.randint(CLASSES, (32, 1), device=device)
    sequences = (start + torch.arange(13, device=device)) % CLASSES
    tokens, labels = sequences[:, :-1], sequences[:, 1:]
    for step in range(41):
        logits = model(tokens)
        # Nobody needs the logits afterwards: their gradient overwrites them.
        loss = tileloom.cross_entropy(logits, labels, inplace_backward=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:2d}: loss {loss.item():.2f}")
    with torch.no_grad():
        counted = model(tokens).argmax(-1)
    print(f"right: {(counted == labels).float().mean().item():.0%}")


if __name__ == "__main__":
    main()
