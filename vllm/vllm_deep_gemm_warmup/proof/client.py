"""Decides which of a server's answers are right; sends it the workload over HTTP."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from vllm_deep_gemm_warmup.proof.workload import Request


@dataclass(frozen=True)
class Endpoint:
    """Where the server listens, and the model's name and vocabulary size."""

    base_url: str
    model: str
    vocab_size: int


@dataclass(frozen=True)
class Answers:
    """What became of a workload of ``asked`` requests in ``seconds`` of wall time.

    The first step took ``first_seconds`` of them. ``right`` were answered as asked,
    each line of ``wrong`` names one that was not; the rest was not sent.
    """

    asked: int
    right: int
    first_seconds: float
    seconds: float
    wrong: tuple[str, ...]


def body(request: Request, endpoint: Endpoint) -> dict[str, Any]:
    """Return the JSON body of a ``/v1/completions`` call for ``request``."""
    return {
        "model": endpoint.model,
        "prompt": request.prompt(endpoint.vocab_size),
        "max_tokens": request.tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "return_token_ids": True,
    }


def fault(request: Request, status: int, answer: Any) -> str | None:
    """Return why ``answer`` is not what ``request`` asked for, or None.

    Checked: the status, the two token counts in ``usage``, and the number of token
    ids where the server returns them.
    """
    if status != 200:
        return f"{request.name}: status {status}: {str(answer)[:300]}"
    try:
        usage, choice = answer["usage"], answer["choices"][0]
        prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    except (KeyError, IndexError, TypeError):
        return f"{request.name}: not a completion: {str(answer)[:300]}"
    if prompt != request.size:
        return f"{request.name}: {prompt} prompt tokens counted, {request.size} sent"
    if completion != request.tokens:
        return f"{request.name}: {completion} tokens, {request.tokens} asked for"
    ids = choice.get("token_ids")
    if ids is not None and len(ids) != request.tokens:
        return f"{request.name}: {len(ids)} token ids, {request.tokens} asked for"
    return None


async def _send(
    session: aiohttp.ClientSession, endpoint: Endpoint, request: Request
) -> str | None:
    url = f"{endpoint.base_url}/v1/completions"
    async with session.post(url, json=body(request, endpoint)) as response:
        text = await response.text()
        try:
            answer = await response.json(content_type=None)
        except ValueError:
            answer = text
        return fault(request, response.status, answer)


async def _send_all(
    endpoint: Endpoint, steps: Sequence[Sequence[Request]], timeout: float
) -> Answers:
    started = time.monotonic()
    wrong: list[str] = []
    right = 0
    first_seconds = 0.0
    # No limit on connections: a batch is in flight as a whole.
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout),
        # A server closes a connection that was idle for a while, and a request that
        # is sent on it just then gets no answer: one connection a request.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        trust_env=False,
    ) as session:
        for step in steps:
            results = await asyncio.gather(
                *(_send(session, endpoint, request) for request in step),
                return_exceptions=True,
            )
            first_seconds = first_seconds or time.monotonic() - started
            broken = False
            for request, result in zip(step, results, strict=True):
                if isinstance(result, (aiohttp.ClientError, TimeoutError)):
                    reason = str(result) or type(result).__name__
                    wrong.append(f"{request.name}: no answer: {reason}")
                    broken = True
                elif isinstance(result, BaseException):
                    raise result
                elif result is None:
                    right += 1
                else:
                    wrong.append(result)
            # The server is gone or hangs: the remaining requests would say the same.
            if broken:
                break
    asked = sum(map(len, steps))
    seconds = time.monotonic() - started
    return Answers(asked, right, first_seconds, seconds, tuple(wrong))


def send(
    endpoint: Endpoint, steps: Sequence[Sequence[Request]], timeout: float
) -> Answers:
    """Send the requests of each step at the same time, one step after the other.

    ``timeout`` is in seconds, per request. Sending ends at the first step in which a
    request got no answer at all.
    """
    return asyncio.run(_send_all(endpoint, steps, timeout))
