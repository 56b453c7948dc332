"""Decides what arguments of `vllm serve` mean: the configuration of an engine."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import pydantic

from .ranks import World

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Without weights and tokenizer files, and without a communicator whose peers would
# have to be there. None of them decides on a GEMM.
_ALONE = ("--load-format=dummy", "--skip-tokenizer-init", "--disable-custom-all-reduce")


class Refused(ValueError):
    """vLLM does not serve these arguments; the message is vLLM's."""


def parse(model: str, arguments: Sequence[str]) -> Any:
    """Return the namespace of ``vllm serve model arguments``.

    Raises:
        Refused: vLLM does not understand them, or its checks of them fail.
        SystemExit: they asked for help, which was given.

    """
    from vllm.entrypoints.common.cli_args import (
        make_arg_parser,
        validate_parsed_serve_args,
    )
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise Refused(message)

    parser = make_arg_parser(Parser(prog="vllm serve"))
    args = parser.parse_args([model, *arguments, *_ALONE])
    args.model = args.model_tag
    with _refusals():
        validate_parsed_serve_args(args)
    return args


def engine_config(args: Any) -> "VllmConfig":
    """Return what the API server would hand to its engines.

    Raises:
        Refused: vLLM does not make an engine of these arguments.

    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.common.cli_args import propagate_flash_late_interaction
    from vllm.usage.usage_lib import UsageContext

    with _refusals():
        engine_args = AsyncEngineArgs.from_cli_args(args)
        propagate_flash_late_interaction(args, engine_args)
        # The context decides on the default of max_num_batched_tokens.
        return engine_args.create_engine_config(
            usage_context=UsageContext.OPENAI_API_SERVER
        )


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn what vLLM raises for what it does not serve into ``Refused``.

    OSError: a folder without config.json, or no such model.
    """
    try:
        yield
    except Refused:
        raise
    except pydantic.ValidationError as error:
        said = "; ".join(detail["msg"] for detail in error.errors())
        raise Refused(said) from error
    except (AssertionError, NotImplementedError, OSError, TypeError, ValueError) as e:
        raise Refused(str(e) or type(e).__name__) from e


def world_of(config: "VllmConfig") -> World:
    """Return the sizes of the parallel groups of one engine."""
    parallel, model = config.parallel_config, config.model_config
    return World(
        # As run_engine_core: engines of a dense model know nothing of each other.
        data=parallel.data_parallel_size if model.is_moe else 1,
        pipeline=parallel.pipeline_parallel_size,
        tensor=parallel.tensor_parallel_size * parallel.prefill_context_parallel_size,
        experts=_experts(config) if parallel.enable_expert_parallel else 0,
    )


def _experts(config: "VllmConfig") -> int:
    redundant: int = config.parallel_config.eplb_config.num_redundant_experts
    return int(config.model_config.get_num_experts()) + redundant
