"""Where the tests run: most of them beside the stand-in, tests/model_executor on it."""

import os
from collections.abc import Iterator

import pytest
from vllm_deep_gemm_warmup import standin

ON_THE_DEVICE = "model_executor"
# Before a test imports what changes it: cv2, for one, adds to LD_LIBRARY_PATH.
AT_THE_START = dict(os.environ)


@pytest.fixture(scope="module", autouse=True)
def beside_the_stand_in(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the children of all other tests without the stand-in of this run.

    And without what the tests on it have set.
    """
    if ON_THE_DEVICE in request.path.parts:
        yield
        return
    plain = standin.without(AT_THE_START)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in os.environ.keys() - plain.keys():
            monkeypatch.delenv(name)
        for name, value in plain.items():
            monkeypatch.setenv(name, value)
        yield
