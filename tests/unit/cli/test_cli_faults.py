"""Faults that a newcomer found: interrupts while loading, odd files, full disks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.checkpoint.local import list_local
from headrace.cli.doctor import Kernels, native_line
from headrace.cli.main import main
from headrace.cli.models import ModelRow, table
from headrace.cli.reporting import report
from headrace.core.errors import ConfigError


def test_ctrl_c_while_loading_ends_whatever_swallows_exceptions() -> None:
    code = (
        "import os, signal\n"
        "from headrace.cli.session import ctrl_c_ends_at_once\n"
        "with ctrl_c_ends_at_once():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        for _ in range(1000): pass\n"
        "    except BaseException: pass\n"
        "print('still here')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stdout == ""


INTERRUPTED_IMPORT = """
import atexit, os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                sum(range(1000))
            except KeyboardInterrupt:
                if {swallowed}:
                    raise ImportError("cannot import") from None
                raise

sys.meta_path.insert(0, Interrupt())
if {module!r} == "atexit":
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.argv = ["headrace", "plan", "gpt-oss-20b", "--machine", "h200"]
from headrace.cli.entry import main
raise SystemExit(main())
"""


@pytest.mark.parametrize(
    ("module", "swallowed"),
    [
        ("argparse", False),  # the first that the command line imports
        ("headrace.cli.serve", False),  # the last
        ("headrace.engine.plan", False),  # by the command itself
        ("headrace.engine.plan", True),  # there, by an import that makes an error of its own of it
        ("atexit", False),  # after the command
    ],
)
def test_ctrl_c_at_any_time_is_130_and_silent(module: str, swallowed: bool) -> None:
    code = INTERRUPTED_IMPORT.format(module=module, swallowed=swallowed)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 130


@pytest.mark.skipif(os.name != "posix", reason="signals are ignored by the shell that starts it")
def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "sys.argv = ['headrace', 'plan', '--models']\n"
        "from headrace.cli.entry import main\n"
        "code = main()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "raise SystemExit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.name != "posix", reason="signals are ignored by the shell that starts it")
def test_an_ignored_interrupt_stops_neither_loading_nor_an_answer() -> None:
    code = (
        "import os, signal\n"
        "from headrace.cli.session import Interrupts, ctrl_c_ends_at_once\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "with ctrl_c_ends_at_once(), Interrupts().caught() as asked:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    sum(range(1000))\n"
        "print('went on' if not asked.asked else 'asked')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_by_a_models_name_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    monkeypatch.setenv("HEADRACE_MODELS", str(tmp_path))
    assert all(m.name != "pipe" for m in list_local())


def test_a_models_folder_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MODELS", "/nonexistent")
    with pytest.raises(ConfigError, match="/nonexistent"):
        list_local()


def test_a_full_disk_is_the_machines_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(OSError(errno.ENOSPC, "No space left on device")) == 3
    assert "cannot write: No space left on device" in capsys.readouterr().err


def test_an_unreadable_file_does_not_widen_the_table() -> None:
    row = ModelRow("m", "/m", "?", "unreadable: " + "x" * 99, 0, None, "because")
    assert table([row])[1].split() == ["m", "?", "unreadable", "0", "B", "?", "because"]


def test_doctor_says_that_other_commands_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels({"cpu": "no such set"}, {}, None, "no such set")
    assert native_line(kernels) == "refused: no such set. Other commands will not start"
    assert native_line(Kernels({"cpu": None}, {}, "avx2")) == "built, and used, with avx2"


def test_seeds_are_those_of_the_api(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "smollm2", "-p", "x", "--seed", str(2**63)]) == 2
    assert "--seed" in capsys.readouterr().err
