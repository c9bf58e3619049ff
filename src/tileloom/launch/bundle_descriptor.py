"""A TMA descriptor for bundled kernels, on a machine without Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tileloom.errors import OptionError


@dataclass(frozen=True)
class TensorDescriptor:
    """A tensor and the size of its tiles, for a kernel parameter that is a descriptor.

    It is what Triton's and Gluon's `TensorDescriptor` are, which a bundled kernel takes as well.
    How a tile lies in shared memory is known to the kernel. Nothing is copied or encoded before
    the launch.

    Attributes:
        base: The tensor. It begins at an address that 16 divides.
        shape: Sizes; at most 5, each at least 1.
        strides: In elements. The last one is 1, the others are multiples of 16 bytes.
        block_shape: Sizes of a tile.
        padding: What is read outside the tensor: ``"zero"`` or ``"nan"``.
        round_f32_to_tf32: Whether float32 is rounded to TF32 as it is loaded.

    Raises:
        OptionError: If one of these does not hold.
    """

    base: Any
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    padding: Literal["zero", "nan"] = "zero"
    round_f32_to_tf32: bool = False

    @classmethod
    def from_tensor(
        cls,
        tensor: Any,
        block_shape: Sequence[int],
        padding: Literal["zero", "nan"] = "zero",
    ) -> TensorDescriptor:
        """Make a descriptor of a whole tensor with its own strides.

        Args:
            tensor: The tensor.
            block_shape: Sizes of a tile.
            padding: What is read outside the tensor.

        Raises:
            OptionError: If the tensor cannot be read by TMA; see the class.
        """
        return cls(tensor, list(tensor.shape), list(tensor.stride()), list(block_shape), padding)

    def __post_init__(self) -> None:
        """Check what TMA demands."""
        for holds, said in self._demands():
            if not holds:
                raise OptionError(
                    f"bundle: a TMA descriptor {said}. Try: a contiguous tensor of its own, or a "
                    "kernel that takes pointers."
                )

    def _demands(self) -> list[tuple[bool, str]]:
        rank, itemsize = len(self.shape), self.base.dtype.itemsize
        counts = (rank, len(self.strides), len(self.block_shape))
        sizes = tuple(self.shape)
        strides = tuple(self.strides)
        return [
            (
                1 <= rank <= 5 and len(set(counts)) == 1,
                f"has {counts[0]} sizes, {counts[1]} strides and {counts[2]} block sizes; it takes "
                "1 to 5 of each",
            ),
            (min(sizes, default=0) > 0, f"has sizes {sizes}; each must be at least 1"),
            (strides[-1:] == (1,), f"has strides {strides}; the last one must be 1"),
            (
                not any(stride * itemsize % 16 for stride in strides[:-1]),
                f"has strides {strides} of {itemsize} bytes; all but the last must be multiples of "
                "16 bytes",
            ),
            (
                self.base.data_ptr() % 16 == 0,
                f"begins at the address {self.base.data_ptr():#x}; 16 must divide it",
            ),
            (
                self.padding in ("zero", "nan"),
                f"has padding {self.padding!r}; zero or nan is taken",
            ),
        ]
