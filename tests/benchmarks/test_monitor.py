"""The monitor's benchmark measures both forms; how long they take is not tested."""

import importlib.util
from pathlib import Path


def test_both_forms_are_measured() -> None:
    path = Path(__file__).with_name("monitor.py")
    spec = importlib.util.spec_from_file_location("monitor_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    best = benchmark.measure(rounds=1, calls=10)
    assert list(best) == ["bare", "wrapped"]
    assert all(0 < nanoseconds < float("inf") for nanoseconds in best.values())
