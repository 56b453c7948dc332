"""A pack is one file; of a pack that is not as it was made nothing is taken."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup import cli
from vllm_deep_gemm_warmup.kernel_caches import EntryState, KernelCache, deep_gemm
from vllm_deep_gemm_warmup.offline import archive
from vllm_deep_gemm_warmup.offline.archive import ArchiveError
from vllm_deep_gemm_warmup.offline.manifest import Manifest, cubin_digest
from vllm_deep_gemm_warmup.proof.fake_nvcc import cubin
from vllm_deep_gemm_warmup.toolchain import recorded

from ..caches.entries import answer, as_it_is, entry_name, write_entry

Members = dict[str, bytes]
ANSWER = answer("13.0.88")


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    """A cache with three whole entries, and what is to stay behind."""
    made = deep_gemm(tmp_path / "cache")
    for number in range(3):
        write_entry(made, number)
    shortened = write_entry(made, 3) / "kernel.cubin"
    shortened.write_bytes(shortened.read_bytes()[:-1])
    (made.folder / entry_name(1) / "notes").write_text("foreign")
    recorded.record(made.root, ANSWER)
    plan = made.root / "deep_gemm_warmup" / "plans" / "0a" / "1b.json"
    plan.parent.mkdir(parents=True)
    plan.write_text("{}")
    manifest_of(made).write(made.root)
    return made


@pytest.fixture
def file(cache: KernelCache, tmp_path: Path) -> Path:
    """Its pack."""
    path = tmp_path / "kernels.tar"
    assert archive.pack(cache.root, path) == 3
    return path


def rewrite(file: Path, change: Callable[[tarfile.TarFile, Members], None]) -> None:
    """Write the pack anew with what `change` makes of its members."""
    with tarfile.open(file) as old:
        members = {m.name: old.extractfile(m).read() for m in old}  # type: ignore[union-attr]
    with tarfile.open(file, "w") as new:
        change(new, members)
        for name, content in members.items():
            add(new, name, content)


def add(new: tarfile.TarFile, name: str, content: bytes = b"", **facts: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for fact, value in facts.items():
        setattr(member, fact, value)
    new.addfile(member, io.BytesIO(content))


KERNEL = f"cache/{entry_name(1)}/kernel.cubin"


def link(new: tarfile.TarFile, members: Members) -> None:
    add(new, KERNEL, type=tarfile.SYMTYPE, linkname="/etc/passwd")


def hard_link(new: tarfile.TarFile, members: Members) -> None:
    add(new, KERNEL, type=tarfile.LNKTYPE, linkname="manifest.json")


def device(new: tarfile.TarFile, members: Members) -> None:
    add(new, KERNEL, type=tarfile.FIFOTYPE)


def named(name: str) -> Callable[[tarfile.TarFile, Members], None]:
    return lambda new, members: add(new, name, b"x")


def other_byte(new: tarfile.TarFile, members: Members) -> None:
    content = bytearray(members[KERNEL])
    content[len(content) // 2] ^= 1
    members[KERNEL] = bytes(content)


def left_out(new: tarfile.TarFile, members: Members) -> None:
    del members[KERNEL]


def unsigned(new: tarfile.TarFile, members: Members) -> None:
    del members[archive.CHECKSUMS]


def consistent_and_broken(new: tarfile.TarFile, members: Members) -> None:
    """The checksums fit, and the kernel is none."""
    members[KERNEL] = b""
    sums = json.loads(members[archive.CHECKSUMS])
    sums[KERNEL] = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    members[archive.CHECKSUMS] = json.dumps(sums).encode()


BAD = {
    "traversal": named("cache/../../escaped"),
    "absolute": named("/tmp/escaped"),
    "climbing entry": named(f"cache/{entry_name(1)}/../../x"),
    "other file": named(f"cache/{entry_name(1)}/other"),
    "top": named("x.pth"),
    "program": named("recorded-nvcc/nvcc"),
    "climbing plan": named("deep_gemm_warmup/plans/../../x.json"),
    "twice": named(KERNEL),
    "symbolic link": link,
    "hard link": hard_link,
    "pipe": device,
    "other byte": other_byte,
    "left out": left_out,
    "no checksums": unsigned,
    "no kernel": consistent_and_broken,
}


def test_what_is_packed_is_what_comes_out(
    cache: KernelCache, file: Path, tmp_path: Path
) -> None:
    """G57: a cache is a file that can be shipped; what is damaged stays behind."""
    root = tmp_path / "new"
    assert archive.unpack(file, root) == (3, 0)
    made = deep_gemm(root)
    assert made.entries() == set(map(entry_name, range(3)))
    for name in made.entries():
        assert cubin_digest(made, name) == cubin_digest(cache, name)
    assert not (made.folder / entry_name(1) / "notes").exists()
    assert (root / "deep_gemm_warmup" / "plans" / "0a" / "1b.json").is_file()
    program = root / "recorded-nvcc" / "nvcc"
    said = subprocess.run(
        [program, "--version"], stdout=subprocess.PIPE, text=True, check=True
    )
    assert said.stdout == ANSWER
    assert list((root / "tmp").iterdir()) == []


def test_a_pack_of_what_engines_built_answers_for_their_compiler(
    cache: KernelCache, tmp_path: Path
) -> None:
    """A host without an nvcc serves from it; with kernels of two, nobody can say."""
    shutil.rmtree(cache.root / recorded.FOLDER)
    (cache.root / "manifest.json").unlink()
    archive.pack(cache.root, tmp_path / "one.tar")
    archive.unpack(tmp_path / "one.tar", tmp_path / "one")
    assert recorded.recorded_answer(tmp_path / "one") == ANSWER
    write_entry(cache, 8, version="13.0.96")
    archive.pack(cache.root, tmp_path / "two.tar")
    archive.unpack(tmp_path / "two.tar", tmp_path / "two")
    assert recorded.recorded_answer(tmp_path / "two") is None


def test_the_same_kernels_make_the_same_file(
    cache: KernelCache, file: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again.tar"
    os.utime(cache.folder / entry_name(1) / "kernel.cu")
    archive.pack(cache.root, again)
    assert again.read_bytes() == file.read_bytes()


def test_what_is_there_stays(file: Path, tmp_path: Path) -> None:
    """G58: a union, no collision."""
    made = deep_gemm(tmp_path / "new")
    write_entry(made, 1, version="13.0.96")
    write_entry(made, 8)
    mine = (made.folder / entry_name(1) / "meta.json").read_text()
    assert archive.unpack(file, made.root) == (2, 1)
    # A host without an nvcc finds nothing, rather than half of it.
    assert recorded.recorded_answer(made.root) is None
    assert (made.folder / entry_name(1) / "meta.json").read_text() == mine
    assert made.entries() == {entry_name(number) for number in (0, 1, 2, 8)}


def test_packs_of_one_compiler_are_joined(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """G58: the manifest lists both; what was there is as it was."""
    made = deep_gemm(tmp_path / "new")
    (write_entry(made, 1) / "kernel.cubin").write_bytes(cubin("sm90_other"))
    write_entry(made, 8)
    recorded.record(made.root, ANSWER)
    replace(manifest_of(made), model="first").write(made.root)
    # A kernel that the manifest does not list, such as one that an engine built.
    (write_entry(made, 2) / "kernel.cubin").write_bytes(cubin("sm90_third"))
    plan = made.root / "deep_gemm_warmup" / "plans" / "0a" / "1b.json"
    plan.parent.mkdir(parents=True)
    plan.write_text("[]")
    before = as_it_is(made.root)
    for _ in range(2):
        archive.unpack(file, made.root)
        manifest = Manifest.read(made.root)
        assert manifest.kernels.keys() == set(map(entry_name, (0, 1, 2, 8)))
        assert manifest.joined == ("m --tensor-parallel-size 8",)
        assert manifest.specs == 8
    after = as_it_is(made.root)
    assert before.items() - {("manifest.json", before["manifest.json"])} <= (
        after.items()
    )
    assert cli.main(["status", str(made.root)]) == 0
    said = capsys.readouterr().out
    assert "first --tensor-parallel-size 8\n          m --tensor" in said


def test_processes_with_one_clock_and_one_seed_do_not_collide(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G59."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    root = tmp_path / "new"
    go, give = os.pipe()
    children = []
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                os.close(give)
                os.read(go, 1)  # ends for all at once
                random.seed(0)
                status = archive.unpack(file, root)[0]
            finally:
                os._exit(status)
        children.append(pid)
    os.close(go)
    os.close(give)
    new = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert sum(new) == 3
    assert list(Manifest.read(root).problems(root)) == []
    assert list((root / "tmp").iterdir()) == []


@pytest.mark.parametrize("by", ["compile", "engines"])
def test_a_pack_of_another_compiler_is_refused(
    file: Path, tmp_path: Path, by: str
) -> None:
    """A host without an nvcc would find the kernels of one of them alone."""
    made = deep_gemm(tmp_path / "new")
    write_entry(made, 8, version="13.0.96")
    if by == "compile":
        recorded.record(made.root, answer("13.0.96"))
    before = as_it_is(made.root)
    with pytest.raises(ArchiveError, match="another compiler"):
        archive.unpack(file, made.root)
    (made.root / "tmp").rmdir()
    assert as_it_is(made.root) == before


@pytest.mark.parametrize("kind", BAD)
def test_of_a_bad_pack_nothing_is_taken(file: Path, tmp_path: Path, kind: str) -> None:
    rewrite(file, BAD[kind])
    made = deep_gemm(tmp_path / "new")
    write_entry(made, 8)
    before = as_it_is(tmp_path)
    with pytest.raises(ArchiveError, match=r"kernels\.tar"):
        archive.unpack(file, made.root)
    (made.root / "tmp").rmdir()
    assert as_it_is(tmp_path) == before


def test_a_file_that_broke_off_is_refused(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    end = len(content.rstrip(b"\0"))
    for length in (100, 5000, end // 2, end - 1):
        file.write_bytes(content[:length])
        with pytest.raises(ArchiveError):
            archive.unpack(file, tmp_path / "new")
    assert deep_gemm(tmp_path / "new").entries() == frozenset()


def test_pack_overwrites_nothing_and_needs_a_kernel(
    cache: KernelCache, file: Path, tmp_path: Path
) -> None:
    before = file.read_bytes()
    for root, target in ((cache.root, file), (tmp_path / "no", tmp_path / "x.tar")):
        with pytest.raises(ArchiveError):
            archive.pack(root, target)
    assert file.read_bytes() == before
    assert not (tmp_path / "x.tar").exists()


def test_verbs_say_it_in_one_line(
    cache: KernelCache,
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["unpack", str(file), str(tmp_path / "new")]) == 0
    assert "3 new kernels, 0 were there" in capsys.readouterr().out
    for words in (
        ["pack", str(cache.root), str(file)],
        ["unpack", str(tmp_path / "missing.tar"), str(tmp_path / "other")],
    ):
        assert cli.main(words) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert len(said.err.splitlines()) == 1
    assert cli.main(["status", str(tmp_path / "new")]) == 0
    assert "kernels   3" in capsys.readouterr().out
    assert cli.main(["status", str(cache.root)]) == 1
    assert f"damaged   {entry_name(3)}" in capsys.readouterr().out
    assert cli.main(["status", str(tmp_path / "missing")]) == 2


def manifest_of(cache: KernelCache, *extra: str) -> Manifest:
    whole = (n for n, state in cache.judge_all() if state is EntryState.WHOLE)
    kernels = {name: cubin_digest(cache, name) for name in whole}
    return Manifest(
        model="m",
        arguments=("--tensor-parallel-size", "8"),
        device="h100",
        target="sm90-132sm",
        versions={"vllm": "0.33.0"},
        library="0" * 8,
        compiler="V13.0.88",
        variables={},
        specs=4,
        kernels=kernels | dict.fromkeys(extra, "0"),
    )


def test_status_compares_the_manifest_with_what_is_there(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """G54, G55: a manifest is checked, and one that lies is named."""
    made = deep_gemm(tmp_path / "new")
    archive.unpack(file, made.root)
    manifest_of(made).write(made.root)
    assert Manifest.read(made.root) == manifest_of(made)
    assert cli.main(["status", str(made.root)]) == 0
    assert "0 not as built" in capsys.readouterr().out
    manifest_of(made, entry_name(9)).write(made.root)
    assert cli.main(["status", str(made.root)]) == 1
    assert f"missing   {entry_name(9)}: missing" in capsys.readouterr().out
    kernel = made.folder / entry_name(0) / "kernel.cubin"
    kernel.write_bytes(kernel.read_bytes().replace(b"sm90", b"sm91"))
    assert cli.main(["status", str(made.root)]) == 1
    line = f"missing   {entry_name(0)}: not the kernel that was built"
    assert line in capsys.readouterr().out
    for text in ("{", "[]", '{"format": 2}', '{"format": 1}'):
        (made.root / "manifest.json").write_text(text)
        assert cli.main(["status", str(made.root)]) == 1
        assert "manifest.json" in capsys.readouterr().out
