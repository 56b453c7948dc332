"""Decides whether the DeepGEMM library can work here, and which scales it takes."""

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType

from vllm_deep_gemm_warmup import cache_care, kernel_caches, toolchain

# The external package comes first, as in vllm.utils.deep_gemm.
_MODULES = ("deep_gemm", "vllm.third_party.deep_gemm")
# ImportError: an undefined symbol; AssertionError: no CUDA toolkit found;
# RuntimeError: its include files are missing.
_IMPORT_FAILURES = (ImportError, AssertionError, OSError, RuntimeError)
_NEEDED_SYMBOLS = ("fp8_gemm_nt", "get_num_sms")


def library_problem() -> str | None:
    """Return why block-FP8 layers cannot run on DeepGEMM here, or None.

    Imports the library, once a process, and asks the compiler for its version;
    builds nothing.
    """
    problem = _import_problem() or _cache_problem() or _toolchain_problem()
    if problem is None:
        _say_toolchain()
        _mend_caches()
    return problem


def describe_cache(folder: str) -> str | None:
    """Return why no kernel can be compiled into the cache folder, or None."""
    if not toolchain.breaks_shell(folder):
        return None
    return (
        f"DeepGEMM cache (DG_JIT_CACHE_DIR={folder}): the library gives the path to a "
        "shell without quotes, and it has a space or another character that means "
        "something there; set DG_JIT_CACHE_DIR or VLLM_CACHE_ROOT to a path without"
    )


def packs_scales() -> bool:
    """Whether DeepGEMM takes four UE8M0 scales in an int32 on this GPU (Blackwell)."""
    from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT

    return DeepGemmQuantScaleFMT.from_oracle() is DeepGemmQuantScaleFMT.UE8M0


@functools.cache
def _import_problem() -> str | None:
    # vLLM sets the library's cache folder before it imports it: keep that order.
    from vllm.utils.deep_gemm import _import_deep_gemm, is_deep_gemm_e8m0_used

    _say_imported_before()
    try:
        is_deep_gemm_e8m0_used()
        library = _import_deep_gemm()
    # vLLM passes on what an external package raises that is no ImportError.
    except _IMPORT_FAILURES:
        library = None
    return describe_import(library, importlib.import_module)


def _say_imported_before() -> None:
    """Say so where another module imported the library before vLLM named its cache.

    DeepGEMM 2.8.1 reads the name with its first kernel: an import alone is no harm.
    """
    from vllm.logger import init_logger

    early = [name for name in _MODULES if name in sys.modules]
    if early and not kernel_caches.deep_gemm_is_named():
        init_logger(__name__).info_once(
            "DeepGEMM library (%s): it was imported before vLLM has named its cache; "
            "if it has built a kernel since, it goes on building in ~/.dj; set "
            "DG_JIT_CACHE_DIR before that",
            early[0],
            scope="local",
        )


def describe_import(
    library: ModuleType | None, import_module: Callable[[str], ModuleType]
) -> str | None:
    """Return what is wrong with the imported library, or None.

    Args:
        library: What vLLM imported; None where it found nothing usable.
        import_module: Repeats a failed import to learn why it failed.

    """
    if library is None:
        failures = "; ".join(_why_not(name, import_module) for name in _MODULES)
        return (
            f"DeepGEMM library ({', '.join(_MODULES)}): {failures}; "
            "reinstall vllm, which brings it"
        )
    missing = [name for name in _NEEDED_SYMBOLS if not hasattr(library, name)]
    if missing:
        where = getattr(library, "__file__", None) or library.__name__
        return (
            f"DeepGEMM library ({where}): it lacks {', '.join(missing)}; uninstall or "
            "update the external deep_gemm package (vLLM prefers it to its own copy)"
        )
    return None


def _why_not(name: str, import_module: Callable[[str], ModuleType]) -> str:
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        return f"{name} is not installed" if error.name == name else str(error)
    except _IMPORT_FAILURES as error:
        return f"{name}: {type(error).__name__}: {error}"
    return f"{name} imports now and did not before"


def _cache_problem() -> str | None:
    return describe_cache(str(kernel_caches.deep_gemm_root()))


@functools.cache
def _say_toolchain() -> None:
    """Say what is needed and what there is, once a node.

    Here, and not where it was chosen: a model without a block-FP8 layer gets no line
    from us. Of a toolchain that cannot be used the reason is said instead.
    """
    from vllm.logger import init_logger
    from vllm.utils.deep_gemm import _import_deep_gemm

    found = toolchain.describe_current()
    if isinstance(found, toolchain.Toolchain):
        init_logger(__name__).info_once(
            "DeepGEMM toolchain: release %s needs %s; found %s",
            getattr(_import_deep_gemm(), "__version__", "unknown"),
            toolchain.needs(),
            found.parts,
            scope="local",
        )


@functools.cache
def _mend_caches() -> None:
    """Put the entries in order, before a kernel is loaded; say what was wrong."""
    from vllm.logger import init_logger

    logger = init_logger(__name__)
    compiler = toolchain.describe_current()
    if isinstance(compiler, toolchain.Toolchain) and compiler.recorded:
        logger.warning_once(
            "DeepGEMM toolchain (%s): there is no nvcc on this host; the recorded "
            "answer of the one that built the cache stands in for it, and a kernel "
            "that is not in the cache cannot be built",
            compiler.nvcc,
            scope="local",
        )
    for cache in kernel_caches.read_kernel_caches():
        intruder = cache_care.intruders(cache)
        if intruder is not None:
            logger.warning_once(intruder, scope="local")
        for line in cache_care.describe(cache, cache_care.mend(cache)):
            logger.warning(line)


def _toolchain_problem() -> str | None:
    found = toolchain.describe_current()
    return str(found) if isinstance(found, toolchain.Unusable) else None
