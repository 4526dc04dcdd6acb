"""``headrace bench machine``: table, picture, JSON, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli import bench, bench_report
from headrace.cli.main import main
from headrace.machine.profile import GpuProfile, HostProfile, LinkProfile, MachineProfile, Rate


def rate(value: float, unit: str = "GB/s", mode: str = "alone") -> Rate:
    return Rate(value, unit, mode, "test")  # type: ignore[arg-type]


PROFILE = MachineProfile(
    name="toy",
    origin="measured",
    host=HostProfile("Toy 9000", 8, 64 << 30),
    gpu=GpuProfile("Toy GPU", 8 << 30),
    link=LinkProfile("PCIe 4.0 x16"),
    rates={
        "dram_read_t4": rate(40),
        "dram_read_t4_overlapped": rate(30, mode="overlapped"),
        "dram_read_t8": rate(80),
        "dram_read_t8_overlapped": rate(60, mode="overlapped"),
        "dram_read": rate(80),
        "dram_read_overlapped": rate(60, mode="overlapped"),
        "cpu_experts_mxfp4_t8": rate(72),
        "cpu_experts_mxfp4": rate(72),
        "pcie_h2d": rate(25.2),
        "gpu_flops_bf16": rate(120_000, "GFLOP/s"),
        "kernel_launch": rate(4.25e-6, "s"),
    },
    best_threads=8,
    measured_at="2026-11-29T12:00:00+00:00",
)


def test_rows_have_units_and_percent() -> None:
    rows = bench_report.rows(PROFILE, {"pcie_h2d": 31.5})
    assert ("DRAM, read", "80.0 GB/s", "60.0 GB/s", "") in rows
    assert ("CPU experts, mxfp4", "72.0 GB/s", "", "") in rows
    assert ("PCIe, host to GPU", "25.2 GB/s", "", "80% of 31.5 GB/s") in rows
    assert ("GPU products, bf16", "120.0 TFLOP/s", "", "") in rows
    assert ("kernel launch", "4.25 us", "", "") in rows
    assert len(rows) == 5  # curves are the picture's


def test_the_picture_in_text() -> None:
    lines = list(bench_report.lines_of_plot(PROFILE))
    assert "plain read loop, GB/s by threads (# alone, = beside a PCIe gather)" in lines
    assert f"   8 {'#' * 48} 80.0 <- best" in lines
    assert f"   4 {'#' * 24} 40.0" in lines
    assert f"     {'=' * 18} 30.0" in lines
    assert not any(
        "=" * 3 in line for line in lines[lines.index("") :][-2:]
    )  # not measured: no bar


def test_every_rate_of_a_profile_is_in_the_table_or_the_picture() -> None:
    shown = len(bench_report.rows(PROFILE, {}))
    drawn = sum(len(points) for points in bench_report.curves(PROFILE).values())
    alone = [name for name in PROFILE.rates if not name.endswith("_overlapped")]
    assert shown + drawn == len(alone)


def test_a_rate_without_words_is_shown_by_its_name() -> None:
    rates = {
        "graph_read": Rate(2.8e-6, "s", "alone", "test"),
        "something_new": Rate(7.0, "GB/s", "alone", "test"),
        "something_new_overlapped": Rate(5.0, "GB/s", "overlapped", "test"),
    }
    rows = bench_report.rows(replace(PROFILE, rates=rates), {})
    assert rows == [
        ("kernel in a graph that reads", "2.80 us", "", ""),
        ("something_new", "7.0 GB/s", "5.0 GB/s", ""),
    ]


def test_a_machine_without_a_gpu_has_nothing_beside() -> None:
    rates = {"dram_read_t1": Rate(8.0, "GB/s", "alone", "test")}
    lines = list(bench_report.lines_of_plot(replace(PROFILE, rates=rates, gpu=None, link=None)))
    assert "plain read loop, GB/s by threads" in lines


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *flags: str) -> int:
    monkeypatch.setattr(bench, "measure", lambda output, progress: (PROFILE, {}, tmp_path / "p"))
    return main(["bench", "machine", *flags])


def test_the_table_goes_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path) == 0
    out, err = capsys.readouterr()
    assert "Toy GPU, PCIe 4.0 x16" in out
    assert "best number of CPU threads beside the GPU: 8" in out
    assert "plain read loop" in out
    assert "stored in" in err


def test_json_is_the_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, "--json") == 0
    assert MachineProfile.from_json(capsys.readouterr().out) == PROFILE


def test_png(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run(monkeypatch, tmp_path, "--png", str(tmp_path / "picture.png")) == 0
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_png_without_matplotlib_is_refused_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headrace.explain.report_png.find_spec", lambda name: None)
    assert run(monkeypatch, tmp_path, "--png", "x.png") == 2
    err = capsys.readouterr().err
    assert "--png needs matplotlib" in err
    assert "printed as text" in err


@pytest.mark.parametrize(("share", "told"), [(0.5, True), (0.03, False)])
def test_a_busy_machine_is_said(
    share: float,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("headrace.machine.disturbance.Watch.look", lambda self: share)
    assert run(monkeypatch, tmp_path) == 0
    err = capsys.readouterr().err
    assert ("other programs keep 50% of the CPUs busy" in err) == told


def test_a_disturbed_profile_says_so_in_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    bench_report.print_table(PROFILE, {})
    assert "disturbed" not in capsys.readouterr().out
    bench_report.print_table(replace(PROFILE, disturbed={"PCIe": 0.42}), {})
    out = " ".join(capsys.readouterr().out.split())
    assert "disturbed: other programs kept 42% of the CPUs busy during PCIe" in out


def test_columns_without_a_number_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    rates = {"dram_read": rate(40), "cpu_experts_mxfp4_of16": rate(9)}
    bench_report.print_table(replace(PROFILE, gpu=None, link=None, rates=rates), {})
    out = capsys.readouterr().out
    assert "alone" in out
    assert "beside" not in out
    assert "theoretical" not in out
    assert "CPU experts, mxfp4, 16 tokens each" in out
    bench_report.print_table(PROFILE, {"pcie_h2d": 31.5})
    out = " ".join(capsys.readouterr().out.split())
    assert "beside" in out
    assert "theoretical" in out


def test_only_what_is_there_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "disk"]) == 2
    assert "machine" in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_PROFILES", str(tmp_path))
    assert main(["bench", "machine", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rates"]["dram_read"]["value"] > 0
    assert found["best_threads"] >= 1
    (stored,) = tmp_path.glob("*.json")
    assert MachineProfile.load(stored).measured_at == found["measured_at"]
