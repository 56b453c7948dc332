"""Decides what shows that a folder of kernels is enough: an engine that builds none."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..proof import run, server
from ..proof.environment import caches
from ..proof.settings import Settings, UsageError, serve_options
from .arguments import Serving, add_serving, read_serving
from .manifest import Manifest, ManifestError, version_of

_SIZES = ("tensor", "pipeline", "data")
_SHOWN = 5
_LIMIT = 8192


def main(argv: Sequence[str]) -> int:
    """Run `vllm-deep-gemm verify DIR MODEL ...`.

    0: the engine built no kernel, before or after it was ready; 1: it did, or did not
    become ready; 2: the command line cannot be followed.
    """
    parser = argparse.ArgumentParser(
        prog="vllm-deep-gemm verify",
        description="Boot `vllm serve` on the stand-in GPU with a folder of kernels, "
        "send it requests of every size, and count the kernels that it builds. "
        "What is built on the way is left in a copy: the folder stays as it is.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    add_serving(parser, "DIR MODEL")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="keep the engine's log"
    )
    given, serving = read_serving(parser, argv)
    try:
        return _verify(given.folder, serving, given.log)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except server.ServerError as error:
        print(error, file=sys.stderr)
        return 1


def _verify(folder: Path, serving: Serving, log: Path | None) -> int:
    if not (folder / "cache").is_dir():
        raise UsageError(f"folder ({folder}): no kernels in it; name another")
    for line in doubts(folder, serving):
        print(line, flush=True)
    with tempfile.TemporaryDirectory(
        prefix="vllm-deep-gemm-", ignore_cleanup_errors=True
    ) as name:
        settings = settings_of(serving, Path(name), log)
        shutil.copytree(folder, caches(settings, Path(name), Path(name)).deep_gemm)
        result = run.prove(settings, os.environ)
    run.show(result)
    built = result.deep_gemm_before + len(result.deep_gemm_after)
    print(f"{folder}: {result.deep_gemm_found} kernels found, {built} built")
    return 1 if result.problems or built else 0


def doubts(folder: Path, serving: Serving) -> list[str]:
    """Return why the manifest of a folder does not promise that it is enough.

    The engine that is booted has the last word: what it lacks, it builds.
    """
    try:
        manifest = Manifest.read(folder)
    except ManifestError as error:
        return [f"manifest: {error}"]
    made_for = {manifest.purpose, *manifest.joined}
    wanted = " ".join((serving.model, *serving.arguments))
    problems = list(manifest.problems(folder))
    lines = [f"manifest: {line}" for line in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"manifest: and {len(problems) - _SHOWN} more")
    if manifest.device != serving.device:
        lines.append(
            f"manifest: made for {manifest.device} ({manifest.target}), now "
            f"{serving.device}: another SM count is another kernel"
        )
    if wanted not in made_for:
        lines.append(
            f"manifest: made for `{'`, `'.join(sorted(made_for))}`, now `{wanted}`"
        )
    return lines + [
        f"manifest: made with {name} {version}, here is {here}"
        for name, version in manifest.versions.items()
        if (here := version_of(name)) != version
    ]


def settings_of(serving: Serving, kept: Path, log: Path | None) -> Settings:
    """Return the run that boots what is to be served.

    Args:
        serving: Its sizes decide how many devices the stand-in has.
        kept: For the caches.
        log: Where the engine's log is kept; None: nowhere.

    Raises:
        UsageError: an option is not to be chosen.
    """
    sizes = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for size in _SIZES:
        initial = f"-{size[0]}p"
        sizes.add_argument(initial, f"--{size}-parallel-size", type=int, default=1)
    sizes.add_argument("--max-num-batched-tokens", type=int, default=_LIMIT)
    given, _ = sizes.parse_known_args(list(map(_with_dashes, serving.arguments)))
    return Settings(
        model=Path(serving.model),
        device=serving.device,
        mode="eager" if "--enforce-eager" in serving.arguments else "graphs",
        tp=given.tensor_parallel_size,
        pp=given.pipeline_parallel_size,
        dp=given.data_parallel_size,
        limit=given.max_num_batched_tokens,
        keep_cache=kept,
        log=log,
        extra=serve_options(serving.arguments),
    )


def _with_dashes(word: str) -> str:
    """Return an option as it is defined; vLLM takes underscores in its name as well."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word
