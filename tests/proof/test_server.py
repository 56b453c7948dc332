"""A server's port is one that nothing else is given while the server starts."""

import socket
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.proof import server


@pytest.mark.parametrize("first", [32768, 20010])
def test_the_system_gives_the_port_to_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: int
) -> None:
    path = tmp_path / "range"
    path.write_text(f"{first}\t60999\n")
    monkeypatch.setattr(server, "_SYSTEM_PORTS", path)
    for _ in range(50):
        port = server.free_port()
        assert server.FIRST_PORT <= port < first
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", server.free_port()))
        port = taken.getsockname()[1]
        monkeypatch.setattr(server, "FIRST_PORT", port)
        monkeypatch.setattr(server, "LAST_PORT", port + 1)
        assert server.free_port() != port


def test_without_ports_of_its_own_the_system_s_are_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "range"
    path.write_text("1024\t65535\n")
    monkeypatch.setattr(server, "_SYSTEM_PORTS", path)
    drawn: list[int] = []

    def sample(ports: range, k: int) -> list[int]:
        drawn.append(k)
        return list(ports)[:k]

    monkeypatch.setattr(server.random, "sample", sample)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", server.free_port()))
    assert drawn == [0]


@pytest.mark.parametrize("text", ["", "many", None])
def test_where_the_system_does_not_say_its_ports_they_are_those_of_linux(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "range"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(server, "_SYSTEM_PORTS", path)
    assert server.FIRST_PORT <= server.free_port() < server.LAST_PORT
