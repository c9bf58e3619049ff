"""Modules that Inductor wrote, their imports changed: what they import, and choose from."""

from __future__ import annotations

import functools
import json
import math
import pickle
import re

import pytest
import torch
from tests.launch.fake_cuda import DeviceTensor
from tests.tuning.modules import (
    arguments_of,
    kernels_of,
    launches_of,
    load,
    modules,
    recorded,
)
from tests.tuning.replayed import STREAM
from torch._inductor.runtime.triton_heuristics import CachingAutotuner as Original
from torch._inductor.wrapper_benchmark import get_triton_kernel

from tileloom.errors import OptionError
from tileloom.tuning import CachingAutotuner, generated, hints, swap
from tileloom.tuning.cached import cached_autotune
from tileloom.tuning.grids import GridExpr
from tileloom.tuning.swap import swapped

MODULES = modules()
NEWEST = {path.stem: path for path in MODULES}  # sorted: later versions come later


def shown(path):
    return f"{path.parent.name}/{path.stem}"


every_module = pytest.mark.parametrize("path", MODULES, ids=shown)


def test_there_are_modules_of_every_kind():
    text = "".join(path.read_text() for path in MODULES)
    kinds = set(re.findall(r"^@triton_heuristics\.(\w+)", text, re.MULTILINE))
    assert kinds == set(generated.DECORATORS) - {"template", "fixed_config"}
    grids = set(re.findall(r"'grid_type': '(\w+)'", text))
    assert {
        "Grid1D", "Grid2D", "MixOrderReductionGrid", "CooperativeReductionGrid", "SplitScanGrid",
        "FixedGrid", "SequentialComboKernelGrid", "SequentialFlattenComboKernelGrid",
    } <= grids  # fmt: skip
    assert len(MODULES) >= 10


@every_module
def test_only_imports_change(path):
    text = path.read_text()
    before, after = text.splitlines(), swapped(text).splitlines()
    assert len(before) == len(after)
    changed = [(old, new) for old, new in zip(before, after) if old != new]
    assert {old for old, _ in changed} <= {
        "from torch._inductor.runtime.triton_heuristics import start_graph, end_graph",
        "from torch._inductor.runtime import triton_helpers, triton_heuristics",
        "from torch._inductor.runtime.hints import AutotuneHint, ReductionHint, TileHint, "
        "DeviceProperties",
    }
    assert len(changed) == 1 + 2 * len(list(kernels_of(text)))
    assert not re.search(r"_inductor[^;\n]*(heuristics|hints)", "\n".join(after)), (
        "inside strings too"
    )


# What 2.10 has and the torch that wrote the module has not: a copy of mix-order configs with other
# warps where nothing asks for max-autotune, and the smallest blocks that TMA takes as a candidate.
# By place in the list.
ADDED = {
    ("torch_2.11/rms_norm_backward", "triton_per_fused_0"): (
        1,
        [{"XBLOCK": 1, "RSPLIT_SIZE": 16, "NUM_STAGES": 1}, 2, 1, [1024, 1, 1]],
    ),
    ("torch_2.13/rms_norm_backward", "triton_per_fused_0"): (
        1,
        [{"XBLOCK": 1, "RSPLIT_SIZE": 16, "NUM_STAGES": 3}, 2, 1, [1024, 1, 1]],
    ),
    ("torch_2.13/tma", "triton_poi_fused_0"): (0, [{"XBLOCK": 4}, 4, 1, [524288, 1, 1]]),
}
# Where the original is wrong: 2.11 has one candidate for TMA, with the smallest blocks it takes.
RIGHT = {
    ("torch_2.11/tma_rows", "triton_red_fused_0"): [
        [{"XBLOCK": 4, "R0_BLOCK": 2048}, 16, 1, [256, 1, 1]]
    ],
}
# Reduction blocks of tiles begin at 1 in 2.10, at 4 in 2.13.
OTHER_BLOCKS = {("torch_2.13/tiled", "triton_red_fused_0")}


@every_module
def test_kernels_choose_from_the_configs_of_the_original_and_have_its_grids(path, tmp_path):
    text = path.read_text()
    expected, launches = (
        json.loads(path.with_suffix(".configs.json").read_text()),
        launches_of(text),
    )
    for name, source in kernels_of(swapped(text)):
        with recorded(generated) as made:
            module = load(source, tmp_path)
        (asked,) = made
        values = dict(zip(arguments_of(getattr(module, name), asked.meta), launches[name]))
        grids = [GridExpr.from_meta(asked.meta, c).evaluate(values) for c in asked.configs]
        listed = [[*plain, list(grid)] for plain, grid in zip(asked.plain, grids)]
        wanted = wanted_of(path, expected, name)
        if (shown(path), name) in OTHER_BLOCKS:
            listed, wanted = tiles(listed), tiles(wanted)
        assert listed == wanted, name


def wanted_of(path, expected, name):
    """The original's rows [kwargs, warps, stages, grid], and what 2.10 has beside."""
    key = shown(path), name
    wanted = list(RIGHT.get(key, expected[name]))
    if key in ADDED:
        wanted.insert(*ADDED[key])
    return wanted


def tiles(listed):
    """Elements of a block, and warps."""
    return [(math.prod(blocks.values()), warps) for blocks, warps, *_ in listed]


def compiled(path, folder):
    """Compile a swapped module's kernels with all their configs, without a GPU."""
    for name, source in kernels_of(swapped(path.read_text())):
        kernel = getattr(load(source, folder), name)
        assert isinstance(kernel, CachingAutotuner)
        kernel.precompile(warm_cache_only=True)
        yield kernel


def launch_all(path, folder, tuned, cuda, monkeypatch):
    """Launch a swapped module's kernels over the fake libcuda, as its wrapper does."""
    text = path.read_text()
    expected = json.loads(path.with_suffix(".configs.json").read_text())
    launches = launches_of(text)
    tuned.times = staticmethod(lambda config: 0.1)  # all are equal: the first wins
    monkeypatch.setattr(
        generated,
        "cached_autotune",
        functools.partial(cached_autotune, caching_autotuner_cls=tuned),
    )
    for name, source in kernels_of(swapped(text)):
        kernel = getattr(load(source, folder), name)
        values = [DeviceTensor() if value is None else value for value in launches[name]]
        cuda.define(kernel.run(*values, stream=STREAM))
        kernel.run(*values, stream=STREAM)
        seen = cuda.last()
        _, warps, _, grid = wanted_of(path, expected, name)[0]
        assert (seen.block, seen.stream) == ((32 * warps, 1, 1), STREAM)
        assert list(seen.grid) == grid or (shown(path), name) in OTHER_BLOCKS


@every_module
def test_kernels_go_to_a_compile_worker_and_back(path, tmp_path):
    for name, source in kernels_of(swapped(path.read_text())):
        module = load(source, tmp_path)
        kernel = getattr(module, name)
        if name.startswith("triton_"):
            assert get_triton_kernel(module) is kernel
        kept = kernel.prepare_for_pickle()
        there = pickle.loads(pickle.dumps(kernel))
        there.restore_after_unpickle(None)
        kernel.restore_after_unpickle(kept)
        assert isinstance(there, Original)
        assert there.configs == kernel.configs
        assert there.inductor_meta == kernel.inductor_meta
        assert kernel.fn is not None


LAUNCHED = ("scan", "own_kernel", "combo_blocks", "tma")


@pytest.mark.parametrize("name", LAUNCHED)
def test_wrappers_launch_their_kernels(name, tmp_path, tuned, cuda, monkeypatch):
    launch_all(NEWEST[name], tmp_path, tuned, cuda, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize(
    "path", [p for p in MODULES if p not in [NEWEST[name] for name in LAUNCHED]], ids=shown
)
def test_every_wrapper_launches_its_kernels(path, tmp_path, tuned, cuda, monkeypatch):
    launch_all(path, tmp_path, tuned, cuda, monkeypatch)


@pytest.mark.parametrize("name", ["adam"])
def test_kernels_compile_without_a_gpu(name, tmp_path):
    for kernel in compiled(NEWEST[name], tmp_path):
        assert not kernel._loaded.failures


@pytest.mark.full
@every_module
def test_every_kernel_compiles_without_a_gpu(path, tmp_path):
    for kernel in compiled(path, tmp_path):
        assert not kernel._loaded.failures


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "from torch._inductor.runtime import triton_heuristics as th, hints",
            "import tileloom.tuning.generated as th; import tileloom.tuning.hints as hints",
        ),
        (
            "import torch._inductor.runtime.triton_heuristics as heuristics",
            "import tileloom.tuning.generated as heuristics",
        ),
        (
            "    from torch._inductor.runtime.hints import (ReductionHint, TileHint)",
            "    from tileloom.tuning.hints import ReductionHint, TileHint",
        ),
    ],
)
def test_other_forms_of_import(before, after):
    wrap = "if True:\n{}" if before.startswith(" ") else "{}"
    assert swapped(wrap.format(before)) == wrap.format(after)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "import torch\n",
            "swap: the module imports nothing of torch._inductor.runtime.triton_heuristics; it "
            "must be one that torch.compile wrote. Try: the output_code.py that "
            "TORCH_COMPILE_DEBUG=1 leaves.",
        ),
        (
            "\nfrom torch._inductor.runtime.triton_heuristics import start_graph, grid\n",
            "swap: line 2 imports grid, which tileloom does not have. Try: a module of torch 2.11 "
            "to 2.13, written without the C++ wrapper.",
        ),
        (
            "import torch._inductor.runtime.triton_heuristics",
            "swap: line 1 imports torch._inductor.runtime.triton_heuristics under its whole name, "
            "which its uses repeat. Try: `import ... as triton_heuristics`, and that name where it "
            "is used.",
        ),
    ],
)
def test_what_cannot_be_changed_is_said(source, text):
    with pytest.raises(OptionError, match=f"^{re.escape(text)}$"):
        swapped(source)


def test_from_the_command_line(tmp_path, capsys):
    path = MODULES[0]
    assert swap.main([str(path)]) == 0
    assert capsys.readouterr().out == swapped(path.read_text())
    target = tmp_path / "swapped.py"
    assert swap.main([str(path), "-o", str(target)]) == 0
    assert target.read_text() == swapped(path.read_text())
    (tmp_path / "other.py").write_text("import torch\n")
    for wrong in (tmp_path / "missing.py", tmp_path / "other.py"):
        with pytest.raises(SystemExit):
            swap.main([str(wrong)])
    said = capsys.readouterr().err
    assert "missing.py cannot be read: No such file" in said
    assert "swap: the module imports nothing" in said


def test_every_name_of_the_original_that_modules_import_is_there():
    for name in ("DeviceProperties", "ReductionHint", "TileHint", "AutotuneHint", "HeuristicType"):
        assert getattr(hints, name) is getattr(generated, name)
    for name in generated.DECORATORS:
        assert callable(getattr(generated, name))


@pytest.mark.full
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="made with torch 2.13")
@pytest.mark.parametrize("name", ["softmax", "combo_blocks"])
def test_modules_are_what_inductor_writes(name, monkeypatch, tmp_path):
    from tests.tuning import make_modules

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made = make_modules.written(make_modules.MODELS[name])
    kept = (make_modules.FOLDER / f"{name}.txt").read_text()

    def without_hash(text):
        return re.sub(r"'backend_hash': '\w+'", "", text)

    assert without_hash(made) == without_hash(kept)
