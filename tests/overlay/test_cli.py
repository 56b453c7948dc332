"""The command's verbs are found late, and their arguments are left alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
from vllm_deep_gemm_warmup import cli


def test_help_names_every_verb_without_loading_any() -> None:
    code = (
        "import sys\nfrom vllm_deep_gemm_warmup import cli\n"
        "try:\n    cli.main(['--help'])\n"
        "finally:\n    print([m for m in sys.modules if 'torch' in m or '.proof' in m"
        " or '.standin' in m])"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    for verb in cli.VERBS:
        assert verb.name in out
        assert verb.help.split()[0] in out
    assert out.splitlines()[-1] == "[]"


def test_arguments_are_handed_on_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--device", "h20", "--", "vllm", "--", "-x"]
    code = "import sys; sys.argv[1:]"
    seen: list[list[str]] = []
    module = type(sys)("a_verb")
    module.main = seen.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_verb", module)
    monkeypatch.setattr(cli, "VERBS", (cli.Verb("run", "a_verb", code),))
    assert cli.main(["run", *given]) == 0
    assert seen == [given]


def test_unknown_verb_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["nonsense"])
    assert caught.value.code == 2
    assert "prove" in capsys.readouterr().err
