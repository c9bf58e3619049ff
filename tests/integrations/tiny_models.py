"""Tiny models with random weights, and batches with padding on the side that one asks for."""

import copy
import json
import shutil

import torch
import transformers
from safetensors.torch import save_file

from tileloom.integrations.hf_embedder import bundled_model

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}


def build(kind, implementation, dtype=torch.float32):
    """A model in eval mode; the same kind always has the same weights."""
    model_class, config = _KINDS[kind]
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    torch.manual_seed(7)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # large enough for attention to matter
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model.to(dtype)


def save_tiny_bert(folder, max_length=24):
    """Write a BERT of random weights with a real tokenizer, as save_pretrained writes it."""
    torch.manual_seed(3)
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.BertModel(config)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model() / name, folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))
    return folder


def batch(lengths, side, seed=0):
    """Token ids and mask of a padded batch, `[B, max(lengths)]` each."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(3, SMALL["vocab_size"], (len(lengths), longest), generator=generator)
    places = torch.arange(longest)
    counts = torch.tensor(lengths)[:, None]
    mask = places < counts if side == "right" else places >= longest - counts
    return ids.masked_fill(~mask, 0), mask.long()


_KINDS = {
    "bert": (
        transformers.BertModel,
        transformers.BertConfig(**SMALL, attn_implementation="eager"),
    ),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMALL, **GROUPED)),
    "mistral": (
        transformers.MistralForCausalLM,
        transformers.MistralConfig(**SMALL, **GROUPED, sliding_window=5),
    ),
    # sliding and full layers in turn, so two masks a forward pass
    "gemma3": (
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig(
            **SMALL,
            **GROUPED,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    # windows in both directions
    "modernbert": (
        transformers.ModernBertModel,
        transformers.ModernBertConfig(
            **SMALL, cls_token_id=1, sep_token_id=2, local_attention=6, global_attn_every_n_layers=2
        ),
    ),
    "gemma2": (
        transformers.Gemma2ForCausalLM,
        transformers.Gemma2Config(**SMALL, **GROUPED, sliding_window=64),
    ),
    # position_bias, cross attention
    "t5": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(
            vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
            decoder_start_token_id=0, pad_token_id=0,
        ),
    ),
    "bart": (
        transformers.BartForConditionalGeneration,
        transformers.BartConfig(
            vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
            decoder_ffn_dim=48, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None,
        ),
    ),
    "vit": (
        transformers.ViTModel,
        transformers.ViTConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            image_size=32, patch_size=8,
        ),
    ),
}  # fmt: skip
