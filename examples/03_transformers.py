"""A model of transformers on tileloom.

`register` gives transformers an attention of the name "tileloom", and the masks it takes. Here a
small decoder with random weights and grouped heads reads a padded batch and goes on writing;
`tileloom demo` does it with a real model. Install transformers by `pip install '.[hf]'`.
"""

import torch
import transformers

from tileloom.integrations import hf_attention
from tileloom.ops import record_choices


def main():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()

    # Two prompts, the second one shorter; once padded on the right, as for embeddings, and once on
    # the left, as for writing on.
    ids = torch.randint(3, 200, (2, 12))
    right = (torch.arange(12) < torch.tensor([[12], [7]])).long()
    left = right.flip(1)

    # Nothing is registered before `register`, nor after the `with` block.
    with hf_attention.register(), torch.inference_mode():
        for side, mask in (("right", right), ("left", left)):
            logits = {}
            for name in ("eager", "tileloom"):
                model.set_attn_implementation(name)
                with record_choices() as choices:
                    logits[name] = model(ids, attention_mask=mask).logits[mask == 1]
            difference = (logits["tileloom"] - logits["eager"]).abs().max()
            problem = choices[0].problem
            form = "key lengths" if problem.has_key_lengths else "a bool mask"
            print(f"padded on the {side}: off by {difference:.1e}; tileloom got {form}, "
                  f"{problem.heads_q} query and {problem.heads_kv} key heads")  # fmt: skip
            assert difference < 1e-5

        # Writing on takes one query against a growing cache.
        written = {}
        for name in ("eager", "tileloom"):
            model.set_attn_implementation(name)
            written[name] = model.generate(
                ids * left, attention_mask=left, max_new_tokens=8, do_sample=False
            )
        print("written:", written["tileloom"][:, 12:].tolist())
        assert torch.equal(written["tileloom"], written["eager"])

    assert "tileloom" not in transformers.AttentionInterface()


if __name__ == "__main__":
    main()
