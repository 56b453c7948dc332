"""Decides what a function answers that only CUDA's headers declare, and writes it.

Functions are weak here, so the linker takes the one of a source file where there is
one. The others answer "not supported" (CUDA) or succeed and do nothing (mathematics).
"""

import re
from collections.abc import Iterable
from pathlib import Path

_WEAK = "__attribute__((weak)) int"
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_UNSUPPORTED_CODE = {
    "cublas": 15,
    "cusolver": 9,
    "cusparse": 10,
    "cudnn": 3000,
    "cufft": 16,
    "curand": 999,
}
# Host-only questions that the real library answers without a driver.
_REAL = re.compile(r"Version|GetProperty|ErrorString|Status(String|Name)|Logger")
# A success without a written answer would leave the caller with a made-up one.
_ANSWERS = re.compile(r"Get|[bB]ufferSize|WorkspaceSize|Query|Find|BackendCreate")
_NOT_HANDLES = ("cufftCreate", "cusparseCreateIdentityPermutation")


def strip_comments(text: str) -> str:
    """Header text without comments."""
    return _COMMENT.sub(" ", text)


def driver_names(header: str) -> set[str]:
    """Every function of ``cuda.h``, under its own and its versioned name."""
    text = strip_comments(header)
    names = set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(", text))
    return names | {symbol for _, symbol in aliases(header)}


def aliases(header: str) -> list[tuple[str, str]]:
    """(name, versioned symbol) pairs of ``cuda.h``."""
    pattern = r"#\s*define\s+(cu[A-Z]\w*)\s+(?:__CUDA_API_PT[DS][SZ]\()?(cu[A-Z]\w*)\)?"
    found = dict(re.findall(pattern, strip_comments(header)))
    return sorted((name, symbol) for name, symbol in found.items() if name != symbol)


def runtime_names(header: str) -> set[str]:
    """Every function of ``cuda_runtime_api.h``."""
    return set(re.findall(r"\bCUDARTAPI\s+(cuda[A-Z]\w*)\s*\(", strip_comments(header)))


def errors(*headers: str) -> list[tuple[int, str]]:
    """(code, name) of the runtime's errors, then the driver's where none was."""
    found: dict[int, str] = {}
    for header in headers:
        pattern = r"\b(cuda(?:Error\w+|Success)|CUDA_(?:ERROR\w+|SUCCESS))\s*=\s*(\d+)"
        for name, code in re.findall(pattern, strip_comments(header)):
            found.setdefault(int(code), name)
    return sorted(found.items())


def declared_source(
    cuda: str, runtime: str, driver_types: str, extra: Iterable[str] = ()
) -> str:
    """C text: weak functions, the alias table and the error table."""
    names = driver_names(cuda) | runtime_names(runtime) | set(extra)
    lines = ["extern int si_unsupported(const char *);"]
    lines += [
        f'{_WEAK} {name}(void) {{ return si_unsupported("{name}"); }}'
        for name in sorted(names)
    ]
    lines.append("struct si_alias { const char *name, *symbol; };")
    lines.append("const struct si_alias si_aliases[] = {")
    lines += [f'    {{"{name}", "{symbol}"}},' for name, symbol in aliases(cuda)]
    lines.append("    {0, 0}};")
    lines.append("struct si_error { int code; const char *name; };")
    lines.append("const struct si_error si_errors[] = {")
    lines += [f'    {{{code}, "{name}"}},' for code, name in errors(driver_types, cuda)]
    lines.append("    {0, 0}};")
    return "\n".join(lines) + "\n"


def _mathematics_body(name: str) -> str | None:
    if _REAL.search(name):
        return None
    prefix = next((p for p in _UNSUPPORTED_CODE if name.startswith(p)), None)
    if prefix is None:
        return None
    if name in _NOT_HANDLES or _ANSWERS.search(name):
        code = _UNSUPPORTED_CODE[prefix]
        return f'(void) {{ si_unsupported("{name}"); return {code}; }}'
    if "Create" in name:
        return "(void **out) { *out = calloc(1, 256); return 0; }"
    if re.match(r"cublas(?!Lt)(?!Set)", name):
        return "(void *handle) { si_blas_called(handle); return 0; }"
    return "(void) { return 0; }"


def mathematics_source(headers: Iterable[str]) -> str:
    """C text: weak functions for every call of the mathematics libraries."""
    names: set[str] = set()
    for header in headers:
        prefixes = "|".join(_UNSUPPORTED_CODE)
        pattern = rf"\b((?:{prefixes})[A-Z]\w*)\s*\("
        names.update(re.findall(pattern, strip_comments(header)))
        renamed = rf"#\s*define\s+\w+\s+((?:{prefixes})[A-Z]\w*_v\d)\b"
        names.update(re.findall(renamed, header))
    bodies = ((name, _mathematics_body(name)) for name in sorted(names))
    lines = ["#include <stdlib.h>", "extern int si_unsupported(const char *);"]
    lines.append("extern void si_blas_called(void *);")
    lines += [f"{_WEAK} {name}{body}" for name, body in bodies if body]
    return "\n".join(lines) + "\n"


def collective_source(header: str) -> str:
    """C text: weak functions for every call of NCCL."""
    names = sorted(set(re.findall(r"\b(p?nccl[A-Z]\w*)\s*\(", strip_comments(header))))
    lines = [f"{_WEAK} {name}(void) {{ return 0; }}" for name in names]
    return "\n".join(lines) + "\n"


def read_all(folder: Path, names: Iterable[str]) -> list[str]:
    """Texts of those headers that the folder has."""
    paths = (folder / name for name in names)
    return [path.read_text(errors="replace") for path in paths if path.is_file()]
