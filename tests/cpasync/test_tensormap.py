"""TMA descriptors on the host: what is refused and in which words, what the driver is asked.

The driver is a model written from its documentation, in its order and independent of the rules.
"""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch
from hypothesis import event, given, settings

from tests.cpasync import layouts
from tests.cpasync.driver_model import Model
from tileloom.cpasync import tensormap
from tileloom.cpasync.tensormap import BYTES_PER_TENSORMAP, TensorMap, TensorMapTable
from tileloom.cpasync.tensormap_layout import Im2col, Tiled
from tileloom.errors import (
    DeviceError,
    DtypeError,
    LaunchError,
    OptionError,
    ShapeError,
    TileloomError,
    UnsupportedError,
)
from tileloom.launch import driver
from tileloom.target import CPU, Target

HOPPER = Target("cuda", (9, 0), 132, 227 * 1024, "a Hopper")


@pytest.fixture
def model(monkeypatch):
    """The documented driver, and CPU tensors that pass for a Hopper's."""
    found = Model()
    monkeypatch.setattr(driver, "library", lambda: found)
    monkeypatch.setattr(tensormap, "target_of_device", lambda device: HOPPER)
    tensormap.cache_clear()
    yield found
    tensormap.cache_clear()


def aligned(*shape, dtype=torch.float16):
    return torch.zeros(*shape, dtype=dtype)  # torch's CPU memory begins at multiples of 64


# ---- the rules
def verdicts(layout, address):
    """Whether we take it, and whether the driver does."""
    library = Model()
    before, driver.library = driver.library, lambda: library
    try:
        said = ""
        try:
            layout.check(address)
        except TileloomError as error:
            said = str(error)
        assert re.fullmatch(rf"({layout.op}: .+\. Try: .+\.)?", said)
        try:
            layout.encode(address)
            drivers = True
        except (LaunchError, IndexError):  # an IndexError: more dimensions than the driver's five
            drivers = False
    finally:
        driver.library = before
    return not said, drivers


@settings(deadline=None, max_examples=100)
@given(layouts.tiled())
def test_what_is_taken_is_what_the_documented_driver_takes(case):
    layout, address = case
    ours, drivers = verdicts(layout, address)
    event(f"taken: {ours}")
    if layout.strides[-1] == 1 or layout.shape[-1] == 1:  # the driver is not told the last stride
        assert ours == drivers
    else:
        assert not ours


@settings(deadline=None, max_examples=100)
@given(layouts.im2col())
def test_the_same_in_im2col_mode(case):
    layout, address = case
    ours, drivers = verdicts(layout, address)
    event(f"taken: {ours}")
    if layout.strides[-1] == 1 or layout.shape[-1] == 1:
        assert ours == drivers
    else:
        assert not ours


RIGHT = {
    "dtype": torch.float16, "shape": (40, 50, 64), "strides": (3200, 64, 1),
    "element_strides": (1, 1, 1), "box": (1, 16, 64),
}  # fmt: skip
IMAGES = {
    "dtype": torch.float16, "shape": (2, 20, 20, 64), "strides": (25600, 1280, 64, 1),
    "element_strides": (1, 1, 1, 1), "lower": (-1, -1), "upper": (-1, -1), "pixels": 64,
    "channels": 64,
}  # fmt: skip


def of_rank(rank, size=40, **changes):
    """Images with so many dimensions."""
    spatial = rank - 2
    right = {
        "shape": (2, *[size] * spatial, 64),
        "strides": (*[64] * (rank - 1), 1),
        "element_strides": (1,) * rank,
        "lower": (0,) * spatial,
        "upper": (0,) * spatial,
    }
    return right | {name: (n,) * spatial for name, n in changes.items()}


# The last value that is taken and the first that is not.
EDGES = [
    (Tiled, {"shape": (40, 2**32, 64)}, {"shape": (40, 2**32 + 1, 64)}),
    (Tiled, {"strides": (3200, 2**39 - 8, 1)}, {"strides": (3200, 2**39, 1)}),
    (Tiled, {"strides": (3200, 8, 1)}, {"strides": (3200, 4, 1)}),
    (Tiled, {"box": (256, 7, 64)}, {"box": (257, 1, 64)}),
    (Tiled, {"box": (57, 256, 8)}, {"box": (73, 200, 8)}),  # 228 KiB, and 128 bytes more
    (Tiled, {"box": (114, 256, 8), "element_strides": (2, 1, 1)}, {"box": (114, 256, 8)}),
    (Tiled, {"box": (1, 256, 64)}, {"box": (1, 257, 64)}),
    (Tiled, {"box": (1, 1, 8)}, {"box": (1, 1, 4)}),
    (Tiled, {"box": (1, 1, 256)}, {"box": (1, 1, 264)}),
    *((Tiled, {"swizzle": f"{n}B", "box": (1, 1, n // 2)},
       {"swizzle": f"{n}B", "box": (1, 1, n // 2 + 8)}) for n in (32, 64, 128)),
    (Tiled, {"element_strides": (8, 8, 1)}, {"element_strides": (9, 1, 1)}),
    (Tiled, {"element_strides": (1, 1, 1)}, {"element_strides": (1, 0, 1)}),
    (Tiled, {"interleave": "16B", "box": (1, 1, 8)}, {"interleave": "16B", "box": (1, 1, 4)}),
    (Tiled, {"interleave": "16B", "strides": (3208, 64, 1)},
     {"interleave": "32B", "swizzle": "32B", "strides": (3208, 64, 1)}),
    *((Im2col, of_rank(rank, lower=low), of_rank(rank, lower=low - 1))
      for rank, low in ((3, -32768), (4, -128), (5, -16))),
    *((Im2col, of_rank(rank, upper=high), of_rank(rank, upper=high + 1))
      for rank, high in ((3, 32767), (4, 127), (5, 15))),
    (Im2col, {"upper": (-20, -20)}, {"upper": (-20, -21)}),
    (Im2col, of_rank(3, size=2**31 - 1, lower=0, upper=0),
     of_rank(3, size=2**31 - 1, lower=0, upper=1)),
    (Im2col, of_rank(3, size=2**31, lower=0, upper=-1),
     of_rank(3, size=2**31, lower=1, upper=0)),
    (Im2col, of_rank(3, size=2**31 - 1, lower=-1, upper=0),
     of_rank(3, size=2**31 - 2, lower=-2, upper=2)),
    (Im2col, {"interleave": "16B", "upper": (-20, -64)},
     {"interleave": "16B", "upper": (-20, -65)}),
    (Im2col, {"interleave": "16B", "upper": (-20, -64)},
     {"interleave": "16B", "upper": (-21, -64)}),
    (Im2col, {"pixels": 1024}, {"pixels": 1025}),
    (Im2col, {"pixels": 912, "channels": 128}, {"pixels": 913, "channels": 128}),
    (Im2col, {"pixels": 1}, {"pixels": 0}),
    (Im2col, {"channels": 256}, {"channels": 264}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "taken", "refused"), EDGES)
def test_edges(kind, taken, refused):
    right = RIGHT if kind is Tiled else IMAGES
    assert verdicts(kind(**(right | taken)), 1 << 20) == (True, True)
    assert verdicts(kind(**(right | refused)), 1 << 20) == (False, False)


WRONG = [
    (Tiled, {"dtype": torch.complex64}, DtypeError,
     "tensor has dtype torch.complex64, which TMA does not move. Try: tensor.view(torch.uint8), or "
     "torch.view_as_real of a complex one."),
    (Tiled, {"swizzle": "256B"}, OptionError,
     "swizzle is '256B'; known: none, 32B, 64B, 128B. Try: swizzle='none'."),
    (Tiled, {"interleave": 16}, OptionError,
     "interleave is 16; known: none, 16B, 32B. Try: interleave='16B'."),
    (Tiled, {"swizzle": "128"}, OptionError,
     "swizzle is '128'; known: none, 32B, 64B, 128B. Try: swizzle='128B'."),
    (Tiled, {"swizzle": 128}, OptionError,
     "swizzle is 128; known: none, 32B, 64B, 128B. Try: swizzle='128B'."),
    (Tiled, {"swizzle": None}, OptionError,
     "swizzle is None; known: none, 32B, 64B, 128B. Try: swizzle='none'."),
    (Tiled, {"fill": "NaN"}, OptionError, "fill is 'NaN'; known: zero, nan. Try: fill='nan'."),
    (Tiled, {"fill": float("nan")}, OptionError, "fill is nan; known: zero, nan. Try: fill='nan'."),
    (Tiled, {"fill": 0}, OptionError, "fill is 0; known: zero, nan. Try: fill='zero'."),
    (Tiled, {"l2_promotion": "normal"}, OptionError,
     "l2_promotion is 'normal'; known: none, 64B, 128B, 256B. Try: l2_promotion='none'."),
    (Tiled, {"dtype": torch.int16, "fill": "nan"}, OptionError,
     "fill='nan' for dtype torch.int16; NaN is filled in for float16, bfloat16, float32 and "
     "float64. Try: fill='zero'."),
    (Tiled, {"tf32": True}, OptionError,
     "tf32=True for dtype torch.float16; only float32 is rounded to TF32. Try: tf32=False."),
    (Tiled, {"shape": (), "strides": (), "box": (), "element_strides": ()}, ShapeError,
     "tensor has 0 dimensions; TMA takes 1 to 5. Try: tensor[None] or tensor.unflatten(...)."),
    (Tiled, {"shape": (2,) * 6, "strides": (64,) * 5 + (1,)}, ShapeError,
     "tensor has 6 dimensions; TMA takes 1 to 5. Try: tensor.flatten(0, 1)."),
    (Tiled, {"shape": (8, 8), "interleave": "16B"}, ShapeError,
     "tensor has 2 dimensions; TMA takes 3 to 5 with interleave='16B'. Try: tensor[None] or "
     "tensor.unflatten(...)."),
    (Tiled, {"shape": (40, 0, 64)}, ShapeError,
     "tensor has shape (40, 0, 64); each size must be 1 to 2^32. Try: returning before the launch "
     "where there is nothing to do."),
    (Tiled, {"strides": (3200, 65, 1)}, ShapeError,
     "tensor's stride along dimension 1 is 65 elements = 130 bytes; TMA needs a multiple of 16 "
     "bytes below 2^40. Try: rows padded to such a size: torch.nn.functional.pad."),
    (Tiled, {"strides": (3200, 1, 64)}, ShapeError,
     "tensor has strides (3200, 1, 64); TMA needs the last dimension contiguous. Try: "
     "tensor.contiguous(), or the transposed tensor with a transposed box."),
    (Tiled, {"strides": (3208, 64, 1), "interleave": "32B", "swizzle": "32B"}, ShapeError,
     "tensor's stride along dimension 0 is 3208 elements = 6416 bytes; interleave='32B' needs a "
     "multiple of 32 bytes below 2^40. Try: rows padded to such a size: torch.nn.functional.pad."),
    (Tiled, {"box": (16, 64)}, ShapeError,
     "box has 2 sizes and tensor 3 dimensions. Try: a size of 1 for each dimension that the box "
     "does not extend along."),
    (Tiled, {"box": (1, 300, 64)}, OptionError,
     "box is (1, 300, 64), 300 along dimension 1; TMA takes 1 to 256. Try: 256 and more loads."),
    (Tiled, {"box": (0, 16, 64)}, OptionError,
     "box is (0, 16, 64), 0 along dimension 0; TMA takes 1 to 256. Try: 1."),
    (Tiled, {"box": (1, 16, 20)}, ShapeError,
     "a box has 20 elements = 40 bytes along the last dimension; TMA needs a multiple of 16 bytes. "
     "Try: 24 elements."),
    (Tiled, {"box": (16, 256, 32)}, OptionError,
     "a box of 16 x 256 x 32 elements has 262144 bytes; TMA takes 233472 at most, which is all of "
     "shared memory. Try: a smaller box."),
    (Tiled, {"box": (1, 16, 20), "interleave": "16B"}, ShapeError,
     "a box has 20 elements = 40 bytes along the last dimension; TMA needs a multiple of 16 bytes. "
     "Try: 24 elements."),
    (Tiled, {"box": (1, 16, 128), "swizzle": "128B"}, OptionError,
     "a box has 128 elements = 256 bytes along the last dimension, and swizzle='128B' permutes "
     "within 128 bytes. Try: a box of 64 elements and more loads, or swizzle='none'."),
    (Tiled, {"interleave": "32B", "swizzle": "64B"}, OptionError,
     "interleave='32B' with swizzle='64B'; it needs swizzle='32B'. Try: swizzle='32B'."),
    (Tiled, {"element_strides": (1, 9, 1)}, OptionError,
     "element_strides is (1, 9, 1); it takes 3 numbers of 1 to 8. Try: leaving element_strides "
     "out, which steps by 1."),
    (Tiled, {"element_strides": (1, 1, 2)}, OptionError,
     "element_strides is (1, 1, 2); without interleave TMA ignores a step along the last dimension."
     " Try: a view of the tensor with one dimension more."),
    (Im2col, {"shape": (8, 64)}, ShapeError,
     "tensor has 2 dimensions; im2col takes [N, W, C], [N, H, W, C] and [N, D, H, W, C]. Try: "
     "tensor.unsqueeze(1)."),
    (Im2col, {"lower": (-1, -129)}, OptionError,
     "lower is (-1, -129); a tensor of 4 dimensions takes 2 numbers of -128 to 127. Try: "
     "lower=(0, 0)."),
    (Tiled, {"box": 64}, OptionError,
     "box is 64; it must be a tuple of integers. Try: box=(40, 50, 64)."),
    (Tiled, {"box": (1, 1.5, 64)}, OptionError,
     "box is (1, 1.5, 64); it must be a tuple of integers. Try: box=(40, 50, 64)."),
    (Im2col, {"upper": (-1,)}, OptionError,
     "upper is (-1,); a tensor of 4 dimensions takes 2 numbers of -128 to 127. Try: upper=(0, 0)."),
    (Im2col, {"upper": (-1, -30)}, OptionError,
     "the window from (-1, -1) to (-1, -30) has (20, -9) pixels in a tensor of shape (2, 20, 20, "
     "64) and ends at (19, -10); each must have 1 at least and end at 2^31 - 1 at most. Try: "
     "upper = padding - dilation * (kernel - 1)."),
    (Im2col, {"pixels": 1025}, OptionError,
     "pixels is 1025; TMA takes 1 to 1024. Try: pixels=1024 and more loads."),
    (Im2col, {"pixels": 1024, "channels": 128}, OptionError,
     "a box of 1024 x 128 elements has 262144 bytes; TMA takes 233472 at most, which is all of "
     "shared memory. Try: a smaller box."),
    (Im2col, {"channels": 0}, OptionError,
     "channels is 0; TMA takes 1 to 256. Try: channels=1."),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "error", "said"), WRONG)
def test_each_demand_has_its_words(kind, changes, error, said):
    right = RIGHT if kind is Tiled else IMAGES
    kind(**right).check(1 << 20)
    with pytest.raises(error) as caught:
        kind(**(right | changes)).check(1 << 20)
    assert str(caught.value) == f"{kind.op}: {said}"


def test_an_address_that_is_not_aligned():
    with pytest.raises(ShapeError) as caught:
        Tiled(**RIGHT).check((1 << 20) + 8)
    assert str(caught.value) == (
        "TensorMap.tiled: tensor begins at the address 0x100008; TMA needs a multiple of 16 bytes. "
        "Try: a slice that begins at such an element, or tensor.clone()."
    )
    wide = Tiled(**RIGHT, interleave="32B", swizzle="32B")
    with pytest.raises(ShapeError, match="interleave='32B' needs a multiple of 32 bytes"):
        wide.check((1 << 20) + 16)


# ---- from a tensor
def test_the_driver_is_asked_in_its_own_order(model):
    x = aligned(6, 40, 64, dtype=torch.float32).transpose(0, 1)  # [40, 6, 64]
    made = TensorMap.tiled(
        x, (16, 2, 32), swizzle="128B", fill="nan", element_strides=(2, 1, 1), tf32=True,
        l2_promotion="256B",
    )  # fmt: skip
    assert model.calls == [{
        "kind": 11, "address": x.data_ptr(), "sizes": [64, 6, 40], "pitches": [40 * 256, 256],
        "box": [32, 2, 16], "steps": [1, 1, 2], "modes": (0, 3, 3, 1),
    }]  # fmt: skip
    assert len(made.encoded) == BYTES_PER_TENSORMAP == 128
    assert made.address == x.data_ptr()
    assert (made.box_shape, made.box_bytes) == ((8, 2, 32), 8 * 2 * 32 * 4)


def test_im2col_asks_in_the_drivers_order(model):
    x = aligned(2, 20, 30, 64)
    made = TensorMap.im2col(
        x, lower=(-1, -2), upper=(-3, -4), pixels=128, channels=32, swizzle="64B",
        element_strides=(1, 2, 3, 1),
    )  # fmt: skip
    assert model.calls == [{
        "kind": 6, "address": x.data_ptr(), "sizes": [64, 30, 20, 2],
        "pitches": [128, 3840, 76800], "lower": [-2, -1], "upper": [-4, -3], "channels": 32,
        "pixels": 128, "steps": [1, 3, 2, 1], "modes": (0, 2, 2, 0),
    }]  # fmt: skip
    assert (made.box_shape, made.box_bytes) == ((128, 32), 128 * 32 * 2)


@pytest.mark.parametrize(
    ("columns", "swizzle", "shared"),
    [(8, "none", 16), (64, "128B", 128), (32, "128B", 128), (8, "128B", 128), (8, "64B", 64),
     (8, "32B", 32), (16, "32B", 32)],
)  # fmt: skip
def test_rows_narrower_than_the_swizzle_are_spaced_out(model, columns, swizzle, shared):
    """Measured on an H200 (test_tensormap_gpu.py): the bytes that arrive are those of the box."""
    made = TensorMap.tiled(aligned(4, 8, 64), (2, 4, columns), swizzle=swizzle)
    assert made.box_bytes == 8 * columns * 2
    assert made.shared_bytes == 8 * shared


@pytest.mark.parametrize("name", ["box_bytes", "shared_bytes"])
def test_what_an_interleaved_load_moves_is_not_known(model, name):
    made = TensorMap.tiled(aligned(4, 8, 64), (1, 4, 8), interleave="16B")
    with pytest.raises(OptionError) as caught:
        getattr(made, name)
    assert str(caught.value) == (
        f"TensorMap.tiled: {name} of interleave='16B' is not known: TMA then moves slices of 16 or "
        "32 bytes and more than the box's elements. Try: interleave='none', or a count of your own."
    )


def test_a_size_of_one_may_have_any_stride(model):
    x = aligned(8, 64).as_strided((1, 8, 1, 64), (7, 64, 3, 1))
    TensorMap.tiled(x, (1, 8, 1, 64))
    assert model.calls[0]["pitches"] == [32, 128, 32]
    row = aligned(512).as_strided((64, 1), (8, 5))  # a column of every eighth element
    TensorMap.tiled(row, (64, 8))
    assert model.calls[1]["sizes"] == [1, 64]


def test_an_expanded_dimension_has_stride_zero(model):
    TensorMap.tiled(aligned(1, 8, 64).expand(4, 8, 64), (1, 8, 64))
    assert model.calls[0]["pitches"] == [128, 0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_bytes_of_any_kind_move(model, dtype):
    TensorMap.tiled(torch.zeros(8, 64, dtype=torch.uint8).view(dtype), (8, 64))
    assert model.calls[0]["kind"] == 0


def test_other_arguments_are_refused(model, monkeypatch):
    x = aligned(8, 64)
    with pytest.raises(DtypeError, match=r"tensor is a list; it must be a torch\.Tensor"):
        TensorMap.tiled([1], (8,))
    with pytest.raises(DtypeError, match=r"tensor is torch\.sparse_coo; TMA needs a dense"):
        TensorMap.tiled(torch.eye(8).to_sparse(), (8, 8))
    with pytest.raises(OptionError, match=r"tiled: box is 8; it takes integers"):
        TensorMap.tiled(x, 8)
    with pytest.raises(OptionError, match=r"tiled: swizzle is \['128B'\]; known: none, 32B"):
        TensorMap.tiled(x, (8, 64), swizzle=["128B"])
    with pytest.raises(OptionError, match=r"pixels and channels is \(1\.5, 8\); it takes integers"):
        TensorMap.im2col(x, lower=(), upper=(), pixels=1.5, channels=8)
    monkeypatch.setattr(tensormap, "target_of_device", lambda device: CPU)
    with pytest.raises(DeviceError) as caught:
        TensorMap.tiled(x, (8, 64))
    assert str(caught.value) == (
        "TensorMap.tiled: tensor is on the device cpu; TMA reads a GPU's memory. "
        "Try: tensor.cuda()."
    )
    # What is wrong besides the device is said first: it stays wrong there.
    with pytest.raises(OptionError, match=r"tiled: swizzle is 'no'; known: none, 32B"):
        TensorMap.tiled(x, (8, 64), swizzle="no")
    with pytest.raises(ShapeError, match=r"strides"):
        TensorMap.tiled(x.t(), (64, 8))
    ampere = Target("cuda", (8, 0), 108, 0, "NVIDIA A100")
    monkeypatch.setattr(tensormap, "target_of_device", lambda device: ampere)
    with pytest.raises(UnsupportedError) as caught:
        TensorMap.tiled(x, (8, 64))
    assert str(caught.value) == (
        "TensorMap.tiled: tensor is on a GPU of compute capability 8.0 (NVIDIA A100), which has no "
        "TMA; 9.0 and later have it. Try: cp_async_gs, which copies 4 to 16 bytes a thread and "
        "needs no descriptor."
    )
    assert model.calls == []


def test_the_drivers_own_refusal_is_passed_on(model):
    layout = Tiled(**(RIGHT | {"box": (1, 300, 64)}))
    with pytest.raises(LaunchError) as caught:
        layout.encode(1 << 20)
    assert str(caught.value) == (
        "launch: encoding a TMA descriptor for shape (40, 50, 64), strides (3200, 64, 1), box "
        "(1, 300, 64), 2 bytes an element, swizzle 0, address 0x100000 failed: CUDA error 1, "
        "invalid argument."
    )


# ---- the cache
def test_equal_descriptors_are_encoded_once(model):
    x = aligned(64, 64)
    first = TensorMap.tiled(x, (8, 64))
    assert TensorMap.tiled(x.view(64, 64), [8, 64]) == first
    assert len(model.calls) == 1
    TensorMap.tiled(x, (16, 64))
    TensorMap.tiled(x[8:], (8, 64))
    TensorMap.tiled(x.view(torch.bfloat16), (8, 64))
    TensorMap.tiled(x, (8, 64), swizzle="128B")
    assert len(model.calls) == 5


def test_a_cached_descriptor_keeps_no_tensor_alive(model):
    x = aligned(64, 64)
    gone = weakref.ref(x)
    made = TensorMap.tiled(x, (8, 64))
    table = TensorMapTable([made])
    del x
    gc.collect()
    assert gone() is None
    assert table.maps == (made,)


def test_the_cache_is_bounded_and_forgets_what_was_used_least(model):
    x = aligned(tensormap.KEPT + 1, 64)
    kept = TensorMap.tiled(x[0], (64,))
    for row in x[1:-1]:
        TensorMap.tiled(row, (64,))
    TensorMap.tiled(x[0], (64,))  # used again: row 1 is now the oldest
    TensorMap.tiled(x[-1], (64,))
    assert tensormap.cache_info().currsize == tensormap.KEPT
    calls = len(model.calls)
    assert TensorMap.tiled(x[0], (64,)) == kept
    assert len(model.calls) == calls
    TensorMap.tiled(x[1], (64,))
    assert len(model.calls) == calls + 1


def test_a_refused_layout_is_refused_again(model):
    for _ in range(2):
        with pytest.raises(OptionError, match="300 along dimension 0"):
            TensorMap.tiled(aligned(512, 64), (300, 64))
    assert model.calls == []


# ---- tables
def test_a_table_lies_at_multiples_of_64(model):
    x = aligned(5, 64)
    maps = [TensorMap.tiled(row, (64,)) for row in x]
    for count in (1, 2, 5):
        table = TensorMapTable(maps[:count])
        assert len(table) == count
        addresses = [table.address_of(i) for i in range(count)]
        assert addresses[0] % 64 == 0
        assert addresses == [addresses[0] + 128 * i for i in range(count)]
        assert bytes(table.host.flatten().tolist()) == b"".join(m.encoded for m in maps[:count])
        copied = table.to("cpu")
        assert copied.data_ptr() != table.host.data_ptr()
        assert copied.data_ptr() % 64 == 0
        assert torch.equal(copied, table.host)


@pytest.mark.parametrize("maps", [[], [b"x" * 128]])
def test_a_table_takes_tensor_maps_only(maps):
    with pytest.raises(OptionError, match="it takes at least one TensorMap, and nothing else"):
        TensorMapTable(maps)
