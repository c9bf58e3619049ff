"""The page about tuning names every name of the original, and what it names is there."""

from __future__ import annotations

import importlib
import re

from tests.house import ROOT

from tileloom.tuning.grids import GRIDS

PAGE = ROOT / "docs" / "tuning.md"

# Every keyword in the index of the seed, Inductor's triton_heuristics of PyTorch 2.10.
_KEYWORDS = """
CachingAutotuner CannotStaticallyLaunchKernel CompileResult DebugAutotuner Grid1D Grid2D Grid3D
Grid2DWithYZOverflow MixOrderReductionGrid CooperativeReductionGrid SplitScanGrid FixedGrid
PrecomputedGrid ComboKernelGrid SequentialComboKernelGrid RoundRobinComboKernelGrid GridExpr
InductorConfig NoTritonConfigsError StaticTritonCompileResult TritonCompileResult _ConstRepr called
class has representing __init__ __post_init__ __call__ __getstate__ __setstate__ _check_max_grid_x
_num_warps _get_nd_reduction_numels _get_config _config_helper make_matmul_triton_config
_constant_fold maximum summation ceildiv assign_tmp generate from_meta eval_slow combo_x_grid
setup_grid_as_args _convert_constant _get_arg_lists _gen_launcher_code make_launcher
_make_launchers launcher _coordinate_descent_tuning coordinate_descent_tuning benchmark_one_config
_create_compile_meta _create_compile_options _precompile_config _precompile_worker precompile
_serialize_metadata _deserialize_metadata _kernel_metadata_cls is_namedtuple
_do_filter_due_to_inductor_config _has_too_small_rblock _nonpromising_xblock_1 _pick_config
_pick_second_largest _r0_block _xblock filter_reduction_configs_for_determinism
_dump_launch_params get_profiler_kwargs save_gpu_kernel _dynamic_scale_rblock _find_names
start_graph end_graph _interpret_args_grid filtered_signature
_maybe_filter_configs_for_tma_restrictions _persistent_reduction_configs _reduction_configs
make_config outer_config_opt total_numel match_target_block_product adapt_config_for_tiling
triton_config triton_config_reduction triton_config_tiled_reduction _pop_config_kwargs
config_to_dict config_from_dict alloc_fn autotune_hints_to_configs autotune_to_one_config bench
benchmark_all_configs kernel_call copy_args_to_cpu_if_needed maybe_copy restore_args_from_cpu
reset_to_zero_args maybe_clone_args prepare_arg clone_args cached_autotune decorator
check_autotune_cache recheck_autotune_cache hash_configs unique_configs can_statically_launch
check_can_launch is_statically_launchable reload_cubin_path check_config check_max_block pointwise
reduction persistent_reduction cooperative_reduction split_scan foreach template fixed_config
user_autotune generate_lookup_hash_from_source_code lookup_autotune_config get_device_interface
get_total_reduction_numel prepare_for_caching prepare_for_pickle restore_after_unpickle
set_compile_info run
"""


def rows():
    """The cells of the table of names: names, what they became, what that is."""
    text = PAGE.read_text()
    table = text[text.index("## Every name of the original") :].partition("\nIts imports:")[0]
    for line in table.splitlines():
        if line.startswith("| `"):
            names, here, what = line.strip("| ").split(" | ")
            yield re.findall(r"`([^`]+)`", names), here, what


def test_every_keyword_of_the_seed_has_one_row():
    named = [name for names, _, _ in rows() for name in names]
    assert sorted(named) == sorted(_KEYWORDS.split())
    assert all(here and what for _, here, what in rows())


def test_what_a_row_names_is_there():
    for names, here, _ in rows():
        found = re.findall(r"`([^`]+)`", here)
        assert found or here in ("not needed", "not there", "not names"), names
        for dotted in found:
            module, *path = dotted.split(".")
            place = importlib.import_module(
                "math" if module == "math" else f"tileloom.tuning.{module}"
            )
            for part in path:
                place = getattr(place, part)


# Every import line of the seed that is no part of the standard library.
_IMPORTS = """
.triton_helpers get_constexprs ..compile_fx clone_preserve_strides ..triton_bundler TritonBundler
..utils prefix_is_reduction .autotune_cache AutotuneCache .benchmarking benchmarker
.coordinate_descent_tuner CoordescTuner .hints .runtime_utils .static_cuda_launcher
StaticallyLaunchedCudaKernel .triton_compat torch torch._inductor config torch._inductor.utils
do_bench_using_profiling torch._dynamo.device_interface DeviceGuard get_interface_for_device
torch._dynamo.utils counters torch._environment is_fbcode torch._guards CompileId
torch._inductor.codecache CudaKernelParamCache torch._prims_common compute_required_storage_length
torch.utils._debug_mode get_active_debug_mode torch.utils._ordered_set OrderedSet metrics triton
triton.runtime.interpreter InterpretedFunction mtia.host_runtime.torch_mtia.acc_flags
"""


def test_every_import_of_the_seed_has_one_row_and_what_it_names_is_there():
    lines = PAGE.read_text().partition("\nIts imports:")[2].splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    named = [name for left, _ in cells for name in re.findall(r"`([^`]+)`", left)]
    assert len(named) == len(set(named))
    assert set(named) >= set(_IMPORTS.split())
    for _, here in cells:
        for dotted in re.findall(r"`([^`]+)`", here):
            module, *path = dotted.removeprefix("tileloom.launch.").split(".")
            parent = "launch" if dotted.startswith("tileloom.launch.") else "tuning"
            place = importlib.import_module(f"tileloom.{parent}.{module}")
            for part in path:
                place = getattr(place, part)


def test_every_grid_has_a_row():
    text = PAGE.read_text()
    table = text[text.index("## Grids") : text.index("## Every name of the original")]
    assert set(re.findall(r"`(\w*Grid\w*)`", table)) >= set(GRIDS)
