"""Where the tests run: most of them beside the stand-in, tests/model_executor on it."""

import os
from collections.abc import Iterator

import pytest
from vllm_deep_gemm_warmup import standin

ON_THE_DEVICE = "model_executor"


@pytest.fixture(scope="module", autouse=True)
def beside_the_stand_in(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the children of all other tests without the stand-in of this run."""
    if ON_THE_DEVICE in request.path.parts:
        yield
        return
    plain = standin.without(os.environ)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in os.environ.keys() - plain.keys():
            monkeypatch.delenv(name)
        for name, value in plain.items():
            monkeypatch.setenv(name, value)
        yield
