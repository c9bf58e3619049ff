"""TMA descriptors without Triton: what they hold, and what TMA does not take."""

import pytest
import torch
from tests.launch.bundle_fakes import FakeTensor

from tileloom.errors import OptionError
from tileloom.launch.bundle_descriptor import TensorDescriptor


def test_of_a_whole_tensor_with_its_strides():
    x = torch.zeros(4, 3, 64, dtype=torch.bfloat16).transpose(0, 1)
    made = TensorDescriptor.from_tensor(x, (1, 2, 64), "nan")
    assert made.base is x
    assert (made.shape, made.strides, made.block_shape) == ([3, 4, 64], [64, 192, 1], [1, 2, 64])
    assert (made.padding, made.round_f32_to_tf32) == ("nan", False)


@pytest.mark.parametrize(
    ("shape", "strides", "block", "more", "said"),
    [
        ([8, 8], [8], [8, 8], {}, "has 2 sizes, 1 strides and 2 block sizes; it takes 1 to 5 of"),
        ([8] * 6, [8] * 5 + [1], [8] * 6, {}, "has 6 sizes, 6 strides and 6 block sizes"),
        ([], [], [], {}, "has 0 sizes, 0 strides and 0 block sizes"),
        ([8, 0], [8, 1], [8, 8], {}, "has sizes (8, 0); each must be at least 1"),
        ([8, 8], [8, 2], [8, 8], {}, "has strides (8, 2); the last one must be 1"),
        ([8, 8], [9, 1], [8, 8], {}, "has strides (9, 1) of 2 bytes; all but the last must be mul"),
        ([8, 8], [8, 1], [8, 8], {"padding": "one"}, "has padding 'one'; zero or nan is taken"),
    ],
)
def test_what_tma_does_not_take(shape, strides, block, more, said):
    with pytest.raises(OptionError) as caught:
        TensorDescriptor(FakeTensor("float16"), shape, strides, block, **more)
    text = str(caught.value)
    assert text.startswith("bundle: a TMA descriptor ")
    assert said in text
    assert text.endswith("Try: a contiguous tensor of its own, or a kernel that takes pointers.")


def test_an_address_that_16_does_not_divide():
    with pytest.raises(OptionError, match="begins at the address 0x7f0000000008; 16 must divide"):
        TensorDescriptor(FakeTensor("float16", 0x7F0000000008), [8], [1], [8])
