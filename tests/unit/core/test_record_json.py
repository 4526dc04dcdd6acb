"""Published records against their JSON schemas and their own error messages."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.core.record_json import record_from_json, record_to_json, schema_of
from headrace.core.step import ClassStats, MovedBytes, StepStats
from headrace.core.trace import RoutingTrace, RoutingTraceMeta
from headrace.machine.profile import (
    GpuProfile,
    HostProfile,
    LinkProfile,
    MachineProfile,
    Rate,
)

SCHEMAS = Path(__file__).parents[3] / "docs/reference/schemas"

PROFILE = MachineProfile(
    name="desk",
    origin="measured",
    host=HostProfile("Toy 9000", 8, 64 << 30, ("avx2", "fma")),
    gpu=GpuProfile("H200", 141 << 30, "sm_90"),
    link=LinkProfile("PCIe 5.0 x16"),
    rates={
        "pcie_h2d": Rate(55.5, "GB/s", "alone", "copy engine, 2026-11-20"),
        "pcie_h2d_overlapped": Rate(51.3, "GB/s", "overlapped", "with 16 reading cores"),
        "kernel_launch": Rate(4e-6, "s", "alone", "empty kernel"),
    },
    best_threads=7,
    measured_at="2026-11-20T10:00:00+00:00",
)
STATS = StepStats(
    step=7,
    phase="decode",
    batch=2,
    tokens=2,
    seconds=0.011,
    classes=(ClassStats("attn.decode", 30, 1000, MovedBytes(dram=4096), 0.002),),
)
META = RoutingTraceMeta("toy-moe", "a page of prose", "CC0-1.0", 8, (1, 3))


@pytest.mark.parametrize(
    ("name", "record"),
    [("machine-profile", PROFILE), ("step-stats", STATS), ("routing-trace-meta", META)],
)
def test_records_satisfy_their_published_schema_and_come_back(name: str, record: Any) -> None:
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    text = record_to_json(record)
    jsonschema.validate(json.loads(text), schema)
    assert record_from_json(type(record), text, "test") == record


def test_the_issue_s_field_names_are_in_the_schema() -> None:
    stats = json.loads(record_to_json(STATS))
    assert {"step", "phase", "batch", "classes"} <= set(stats)
    assert set(stats["classes"][0]) == {"id", "calls", "flops", "bytes", "seconds"}
    assert set(stats["classes"][0]["bytes"]) == {"hbm", "pcie", "dram"}
    profile = json.loads(PROFILE.to_json())
    assert set(profile["rates"]["pcie_h2d"]) == {"value", "unit", "mode", "source"}


def edited(path: str, value: Any) -> str:
    """The profile's JSON with one field replaced, or removed where the value is ``...``."""
    data: dict[str, Any] = json.loads(PROFILE.to_json())
    *parents, last = path.split("/")
    at: Any = data
    for key in parents:
        at = at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("host", ..., "host"),
        ("host/cores", 0, "$.host.cores"),
        ("host/cores", "8", "$.host.cores"),
        ("host/clock", 5, "$.host.clock"),
        ("rates/pcie_h2d/value", -1, "value"),
        ("rates/pcie_h2d/unit", "GiB/s", "unit"),
        ("rates/pcie_h2d/mode", "overlapped", "rates['pcie_h2d'].mode"),
        ("rates/pcie_h2d/when", "now", "$.rates['pcie_h2d'].when"),
        ("rates/Bad name", {"value": 1, "unit": "s", "mode": "alone", "source": "x"}, "Bad name"),
        ("gpu/vram", 1, "$.gpu.vram"),
        ("gpu", None, "link is given"),
        ("origin", "guessed", "origin"),
        ("version", 1, "version"),
        ("best_threads", 0, "best_threads"),
        ("extra", 1, "$.extra"),
    ],
)
def test_profile_errors_name_the_field(path: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MachineProfile.from_json(edited(path, value), "desk.json")
    assert says in caught.value.message
    assert "desk.json" in caught.value.message


def test_the_schema_refuses_what_the_reader_refuses() -> None:
    validator = jsonschema.Draft202012Validator(schema_of(MachineProfile))
    for path, value in [("host/cores", 0), ("host/clock", 5), ("origin", "guessed"), ("host", ...)]:
        assert not validator.is_valid(json.loads(edited(path, value)))


def test_profile_files(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "desk.json")
    assert MachineProfile.load(tmp_path / "desk.json") == PROFILE
    with pytest.raises(ConfigError, match=r"none\.json"):
        MachineProfile.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="not JSON"):
        MachineProfile.from_json("{")
    with pytest.raises(ConfigError, match="not JSON"):
        MachineProfile.from_json("[" * 100_000)
    with pytest.raises(ConfigError, match="object"):
        MachineProfile.from_json("[]")


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
def test_trace_round_trip(tmp_path: Path, dtype: type[Any]) -> None:
    ids = np.array([[[0, 7], [3, -1]], [[1, 2], [5, 6]]], dtype=dtype)
    RoutingTrace(ids, META).save(tmp_path / "t.npz")
    back = RoutingTrace.load(tmp_path / "t.npz")
    np.testing.assert_array_equal(back.ids, ids)
    assert back.ids.dtype == dtype
    assert back.meta == META


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (np.zeros((2, 1, 2), np.int64), "int64"),
        (np.zeros((2, 2), np.int16), "2 axes"),
        (np.zeros((3, 1, 2), np.int16), "3 layers"),
        (np.full((2, 1, 2), 8, np.int16), "run from 8 to 8"),
        (np.full((2, 1, 2), -2, np.int16), "run from -2"),
    ],
)
def test_a_trace_that_contradicts_itself(tmp_path: Path, ids: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RoutingTrace(ids, META).save(tmp_path / "t.npz")
    assert not (tmp_path / "t.npz").exists()


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    other, text = tmp_path / "other.npz", tmp_path / "text.npz"
    np.savez(other, weights=np.zeros(3))
    text.write_text("hello", encoding="utf-8")
    for path in (other, text, tmp_path / "missing.npz"):
        with pytest.raises(ConfigError, match="is not a routing trace"):
            RoutingTrace.load(path)
    with pytest.raises(ConfigError, match=r"text\.npz is not a routing trace: it is no npz file\n"):
        RoutingTrace.load(text)  # NumPy's own words are advice to read it as a pickle, unsafely


def _npz(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def test_damaged_files_are_no_traces_and_no_faults_of_ours(tmp_path: Path) -> None:
    whole = tmp_path / "whole.npz"
    RoutingTrace(np.zeros((2, 64, 2), np.int16), META).save(whole)
    kept = bytearray(whole.read_bytes())
    central = kept.find(b"PK\x01\x02")  # of the first member; its flags at +8, its packer at +10
    inside = len("ids.npy") + 30 + 20  # local header, name and zip64 sizes; then what was deflated
    damaged = {
        "deflated": ({inside + i: kept[inside + i] ^ 255 for i in range(8)}, "decompressing"),
        "packer": ({central + 10: 99}, "compression"),
        "locked": ({central + 8: kept[central + 8] | 1}, "password"),
    }
    for name, (changes, says) in damaged.items():
        content = bytearray(kept)
        for at, value in changes.items():
            content[at] = value
        path = tmp_path / f"{name}.npz"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"is not a routing trace: .*{says}"):
            RoutingTrace.load(path)

    single = tmp_path / "single.npy"
    np.save(single, np.zeros(3))
    with pytest.raises(ConfigError, match="one array"):
        RoutingTrace.load(single)
    bare = _npz(tmp_path / "bare.npz", {"ids.npy": b"no header", "meta.npy": b"{}"})
    with pytest.raises(ConfigError, match="ids is no array"):
        RoutingTrace.load(bare)
    # 10^17 numbers of four bytes: more than any machine's memory
    header = b"{'descr': '<i4', 'fortran_order': False, 'shape': (100000000000000000,), }"
    header = header.ljust(117) + b"\n"
    huge = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with pytest.raises(ConfigError, match="is not a routing trace: Unable to allocate"):
        RoutingTrace.load(_npz(tmp_path / "huge.npz", {"ids.npy": huge, "meta.npy": b""}))


def test_the_key_of_a_mapping_is_named() -> None:
    data = json.loads(PROFILE.to_json())
    data["rates"]["kernel_launch"]["value"] = -1
    with pytest.raises(ConfigError, match=r"rates\['kernel_launch'\]\.value"):
        MachineProfile.from_json(json.dumps(data))


@pytest.mark.parametrize("number", ["1e400", "NaN", "Infinity"])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    text = PROFILE.to_json().replace("55.5", number)
    with pytest.raises(ConfigError, match=number):
        MachineProfile.from_json(text)
