"""Prints what every distinct rank of an engine will run.

    python -m vllm.model_executor.warmup.deep_gemm_jit.offline
        [--every-rank] MODEL [vllm serve arguments]

Standard output is one JSON object and nothing else:
`{"ranks": [...]}`, or `{"refused": reason}` where vLLM does not serve such arguments.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NoReturn

from vllm_deep_gemm_warmup.compiling.children import killed_with
from vllm_deep_gemm_warmup.settings import read_settings

from .lone_rank import bind_caches, worker_of
from .ranks import Rank, World
from .serving import Refused, engine_config, parse, world_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..plan import Plan
    from ..sm_counts import Share
    from ..spec import Spec

_EVERY_RANK = "--every-rank"


def main(argv: Sequence[str]) -> int:
    """Plan and print; return the exit status."""
    from vllm.plugins import load_general_plugins

    # Imported once, for every rank.
    importlib.import_module("vllm.v1.worker.gpu_worker")
    load_general_plugins()
    with _own_output() as output:
        answer = _plan_ranks(argv)
        if answer is None:
            return 1
        json.dump(answer, output)
    return 0


@contextlib.contextmanager
def _own_output() -> Iterator[IO[str]]:
    """Yield standard output, and give everything else that prints the other one."""
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        yield output


def _plan_ranks(argv: Sequence[str]) -> dict[str, Any] | None:
    """Ask rank by rank, the first one first: it tells how many there are."""
    every_rank = argv[0] == _EVERY_RANK
    words = argv[every_rank:]
    answers: list[dict[str, Any]] = []
    ranks = [Rank(0, 0, 0)]
    while ranks:
        answer = _fork(words, ranks.pop(0))
        if answer is None or "refused" in answer:
            return answer
        if not answers:
            world = World(**answer["world"])
            ranks = list(world.every() if every_rank else world.distinct())[1:]
        answers.append(answer)
    return {"ranks": answers}


def _fork(words: Sequence[str], rank: Rank) -> dict[str, Any] | None:
    """Become ``rank`` in a forked process, which ends with it, and return its plan.

    vLLM has one set of groups per process, and making a configuration begins to use
    the device, which no fork outlives: each child makes its own.
    """
    with tempfile.TemporaryFile("w+") as answer:
        sys.stdout.flush()
        sys.stderr.flush()
        die_too = killed_with(os.getpid())
        pid = os.fork()
        if pid == 0:
            die_too()
            _answer(words, rank, answer)
        _, status = os.waitpid(pid, 0)
        if status:
            print(
                f"DeepGEMM plan (rank {rank}): it ended with status "
                f"{os.waitstatus_to_exitcode(status)}; the lines above say why",
                file=sys.stderr,
            )
            return None
        answer.seek(0)
        loaded: dict[str, Any] = json.load(answer)
        return loaded


def _answer(words: Sequence[str], rank: Rank, answer: IO[str]) -> NoReturn:
    status = 1
    try:
        json.dump(_plan_or_refuse(words, rank), answer)
        answer.flush()
        status = 0
    # The border of this process: what failed goes to the log.
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        # Destructors would wait for the peers that are not there.
        os._exit(status)


def _plan_or_refuse(words: Sequence[str], rank: Rank) -> dict[str, Any]:
    model, *arguments = words
    try:
        config = engine_config(parse(model, arguments))
    except Refused as error:
        return {"refused": str(error)}
    return _plan(config, rank)


def _plan(config: "VllmConfig", rank: Rank) -> dict[str, Any]:
    from .. import ahead
    from ..plan import Registered, Skipped, Unregistered, make_plan

    world = world_of(config)
    max_tokens = config.scheduler_config.max_num_batched_tokens
    ahead.only_ask()
    with worker_of(config, world, rank) as worker:
        announced = ahead.announced(config)
        bind_caches(config, worker)
        plan = make_plan(worker.get_model(), max_tokens)
        shares = list(_shares(worker, plan, announced, max_tokens))
    return {
        "world": dataclasses.asdict(world),
        "rank": dataclasses.asdict(rank),
        "shares": shares,
        "max_tokens": max_tokens,
        "registered": len(plan.select(Registered)),
        "skipped": sorted({outcome.reason for outcome in plan.select(Skipped)}),
        "unregistered": sorted(
            {f"{o.name}: {o.reason}" for o in plan.select(Unregistered)}
        ),
    }


def _shares(
    worker: Any, plan: "Plan", announced: "Mapping[Spec, str]", max_tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield what runs with each number of SMs; with all of them ``plan``, first.

    Beside it what an engine begins with before it knows better: with all SMs, too.
    """
    if not plan.specs:
        return
    from .. import sm_counts
    from ..backend import read_target
    from ..plan import make_plan

    target = read_target(worker.device)
    whole, *parts = sm_counts.shares(target, max_tokens, plan.config)
    yield _share(whole, plan.specs, announced)
    for part in parts:
        with sm_counts.in_use(part.target):
            less = make_plan(worker.get_model(), part.max_tokens)
            yield _share(part, less.specs, {})


def _share(
    share: "Share", planned: "Sequence[Spec]", announced: "Mapping[Spec, str]"
) -> dict[str, Any]:
    """Return specs, and what planning their kernels takes, but for the compiler."""
    from ..machine import read_config

    settings = dataclasses.replace(read_settings(), workers=1)
    reasons = dict.fromkeys(planned) | {
        spec: reason for spec, reason in announced.items() if spec not in planned
    }
    return {
        "target": str(share.target),
        "config": read_config(share.target, settings).to_json(),
        "specs": [_spec(spec, reason) for spec, reason in reasons.items()],
    }


def _spec(spec: "Spec", unconfirmed: str | None) -> dict[str, Any]:
    from ..entry_points import STRATEGIES

    return {
        "spec": spec.to_json(),
        "text": str(spec),
        "in_deep_gemm_cache": STRATEGIES[spec.entry_point].in_deep_gemm_cache,
        "unconfirmed": unconfirmed,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
