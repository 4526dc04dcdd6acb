"""``headrace kernels``: names, stages, and errors that say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from headrace.cli import kernels
from headrace.cli.main import main
from headrace.machine.device import HostDevice
from headrace.ops import lowering
from headrace.ops.inventory import ABOUT, Entry, Inventory
from headrace.ops.registry import BACKENDS, OP_NAMES, OPTIONAL, resolve, unavailable_reason
from tests.fixtures.triton_interpreter import needs_triton


def headrace(*args: str) -> subprocess.CompletedProcess[str]:
    """In a process that compiles kernels: this one may interpret them."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", "kernels", *args],
        capture_output=True, text=True, check=False, env=env, timeout=120,
    )  # fmt: skip


def test_the_parser_knows_what_the_compiler_does():
    assert kernels.ARCHITECTURES == lowering.ARCHITECTURES
    assert kernels.STAGES == lowering.STAGES


def test_help_imports_nothing_heavy():
    code = "import sys; from headrace.cli.main import build_parser; build_parser().format_help();"
    code += "assert not {'torch', 'triton', 'numpy'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["kernels", "show", "decode_bf16", "--stage", "wasm"]) == 2
    assert "ttgir" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--summary", "--json"])
def test_a_stage_that_would_not_be_printed_is_refused(
    flag: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["kernels", "show", "decode_bf16", "--stage", "ptx", flag]) == 2
    assert f"--stage ptx says nothing beside {flag}" in capsys.readouterr().err


@needs_triton
@pytest.mark.slow
def test_kernels_are_listed_and_shown_at_each_stage():
    listed = headrace("list", "--json")
    assert listed.returncode == 0, listed.stderr
    assert {"decode_nvfp4k_fp8v", "prefill_bf16", "seal_fp8"} <= set(
        json.loads(listed.stdout)["kernels"]
    )
    marks = {
        "ttir": "tt.func public @sealed_merge_kernel",
        "ttgir": "ttg.",
        "llir": "define",
        "ptx": ".target sm_100",
        "sass": "EXIT",
    }
    for stage, mark in marks.items():
        shown = headrace("show", "decode_merge", "--arch", "sm_100", "--stage", stage)
        assert shown.returncode == 0, shown.stderr
        assert mark in shown.stdout
    unknown = headrace("show", "nothing")
    assert unknown.returncode == 2
    assert "decode_bf16" in unknown.stderr


@needs_triton
def test_an_interpreting_process_says_so(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["kernels", "show", "decode_bf16"]) == 3
    assert "TRITON_INTERPRET" in capsys.readouterr().err
    assert main(["kernels", "list"]) == 0  # the operations are there all the same
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("`headrace kernels show` cannot compile here: ")
    assert "TRITON_INTERPRET" in last


@needs_triton
@pytest.mark.slow
def test_a_kernel_of_one_architecture_says_so():
    """Compiling it for another would end the process in the compiler."""
    shown = headrace("show", "prefill_tiles_bf16", "--arch", "sm_80")
    assert shown.returncode == 2
    assert "sm_90" in shown.stderr
    shown = headrace("show", "prefill_tiles_bf16", "--stage", "ttir")
    assert shown.returncode == 2
    assert "ttgir" in shown.stderr


def test_every_operation_is_listed_with_its_back_ends(capsys: pytest.CaptureFixture[str]):
    """The registry's names, the experts' kernels and sampling, and why a back-end is not used."""
    assert main(["kernels", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    entries = {entry["name"]: entry for entry in found["operations"]}
    assert list(entries) == [*OP_NAMES, "expert_cache", "expert_service", "host_sampler"]
    assert set(ABOUT) == set(OP_NAMES)
    assert all(entry["about"] for entry in entries.values())
    assert len({entry["about"] for entry in entries.values()}) == len(entries)
    assert set(found["backends"]) == set(BACKENDS)
    for name in set(OP_NAMES) - OPTIONAL:
        assert {"cpu", "reference"} & set(entries[name]["backends"])
        assert entries[name]["cpu"] in ("cpu", "reference")
    serving = resolve(HostDevice.backends).describe()
    assert {name: entries[name]["cpu"] for name in serving} == serving
    for name, reason in found["backends"].items():
        assert reason == unavailable_reason(name)


def test_what_is_there_and_cannot_be_used_says_why():
    entries = (
        Entry("embed", ("triton", "reference"), "reference"),
        Entry("route", ("triton",), None, None, "in one: linear, router_topk"),
    )
    reasons = {"triton": "no CUDA device", "reference": None}
    assert kernels.lines(Inventory(entries, reasons)) == [
        "OPERATION  triton  reference  ON THE CPU  ON THE GPU  WHAT",
        "embed      (yes)   yes        reference   -",
        "route      (yes)   -          -           -           in one: linear, router_topk",
        "",
        "(yes): triton cannot be used here: no CUDA device",
    ]
    assert kernels.lines(Inventory(entries, reasons), 50)[3:9] == [
        "embed",
        "    (yes)   yes        reference   -",
        "route",
        "    (yes)   -          -           -",
        "    in one: linear, router_topk",
        "",
    ]
    usable = kernels.lines(Inventory(entries, {"triton": None, "reference": None}))
    assert usable[1].split() == ["embed", "yes", "yes", "reference", "-"]
    assert "(yes)" not in "".join(usable)
