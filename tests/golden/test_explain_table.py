"""The explain table as it is printed, of a step whose numbers are given."""

from dataclasses import replace
from pathlib import Path

from headrace.core.step import ClassStats, MovedBytes, StepStats
from headrace.explain import leaf
from headrace.explain.advice import Room
from headrace.explain.report import Sample, explain, kv_choices
from headrace.explain.report_text import changes, roofline, table
from headrace.explain.running_cost import decode_rows
from tests.fixtures.running_models import KERNELS, dense_model, machine

GOLDEN = Path(__file__).parent / "explain" / "decode.txt"

SECONDS = {
    leaf.DENSE_FFN: (4, 3.0e-6),
    leaf.QKV: (2, 1.0e-6),
    leaf.ATTENTION_DECODE: (2, 1.5e-6),
    leaf.O_PROJECTION: (2, 0.5e-6),
    leaf.LM_HEAD: (1, 0.6e-6),
    leaf.SAMPLING: (1, 0.1e-6),
    leaf.SCHEDULE: (3, 2.0e-6),
}


def stats(step_s: float) -> StepStats:
    classes = tuple(ClassStats(n, c, 0, MovedBytes(), s) for n, (c, s) in SECONDS.items())
    return StepStats(step=1, phase="decode", batch=1, tokens=1, seconds=step_s, classes=classes)


def report(step_s: float = 10e-6):
    sample = Sample([stats(step_s), stats(step_s)], decode_rows(1, 5))
    return explain("a toy", sample, dense_model(), machine(**KERNELS))


def test_on_80_columns_names_stand_above_their_numbers():
    wide, narrow = table(report()), table(report(), 80)
    numbers = [line for line in narrow[2:] if line.startswith("    ")]
    assert max(map(len, numbers)) <= 80
    assert " ".join(narrow).split() == " ".join(wide).split()
    # the heads, each class, what is unexplained, the step: two lines each
    assert len(narrow) - len(wide) == len(report().rows) + 3
    ends = narrow[3].index("MEASURED") + len("MEASURED")
    assert {line[:ends].split()[-1] for line in numbers[1:]} == {"us", "ns"}
    ends = narrow[3].index("FLOOR") + len("FLOOR")
    assert numbers[-1][:ends].split()[-1] == "us"  # of the step
    assert {len(line) for line in numbers} == {4 + 72}
    # where there is room for both they stand side by side
    assert table(report(), max(map(len, wide))) == wide


def test_golden_text():
    found = report()
    text = "\n".join([*table(found), *roofline(found, 1e12, 1e9), *changes(found)]) + "\n"
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_classes_and_gap_add_up_to_the_step():
    found = report()
    assert sum(row.measured_s for row in found.rows) + found.gap_s == found.step_s
    assert abs(sum(row.share for row in found.rows) + found.gap_s / found.step_s - 1) < 1e-12
    assert [row.id for row in found.rows][:2] == [leaf.DENSE_FFN, leaf.SCHEDULE]


def test_floors_by_hand():
    rows = {row.id: row for row in report().rows}
    ffn = rows[leaf.DENSE_FFN]
    assert ffn.nbytes == 1536
    assert abs(ffn.floor_s - 1.536e-6) < 1e-12  # at 1 GB/s
    assert abs((ffn.ratio or 0) - 3.0 / 1.536) < 1e-9
    assert ffn.bound == "dram"
    assert rows[leaf.SCHEDULE].ratio is None


def test_threads_that_are_left_are_told():
    sample = Sample([stats(10e-6)], decode_rows(1, 5))
    one, all_ = (explain("a toy", sample, dense_model(), machine(), n).advice[-1] for n in (1, 2))
    assert "1 of 2 cores" in one
    assert "0% of the step" in one
    assert all_ == "Threads: all 2 cores compute."


def test_json_holds_the_same():
    data = report().to_data()
    assert data["rows"][0]["id"] == leaf.DENSE_FFN
    assert data["steps"] == 2
    assert {c["name"] for c in data["hardware"]} == {"host memory rate x 2"}


def test_what_stands_above_the_roof_is_told():
    # The feed-forward reads 1,536 bytes in 3 us: 0.51 GB/s, below 1 GB/s and above 0.1.
    assert "Above the roof" not in "\n".join(roofline(report(), 1e12, 1e9))
    last = roofline(report(), 1e12, 1e8)[-1]
    assert last.startswith("Above the roof, which is main memory's: a, ")


def test_arithmetic_above_its_roof_is_not_read_from_a_cache():
    """128 multiply-adds for 512 B of weights in 1 us are 512 MFLOP/s, above a roof of 100."""
    text = "\n".join(roofline(report(), 1e8, 1e9))
    assert "which is main memory's" not in text
    assert "Above the roof, which is arithmetic's: a, " in text
    slow = machine()
    flops = replace(slow.rates["cpu_flops_f32"], value=0.1)  # 100 MFLOP/s: 5 us for q, k and v
    slow = replace(slow, rates={**slow.rates, "cpu_flops_f32": flops})
    sample = Sample([stats(10e-6)], decode_rows(1, 5))
    notes = explain("a toy", sample, dense_model(), slow).notes
    assert not any("cache" in note for note in notes)
    assert any("A ratio below 1" in note and "qkv-projection" in note for note in notes)


def test_points_in_one_place_are_all_named():
    """a, d and f: 1.536 kB, 512 B and 256 B, one FLOP a byte, all in half of 1/GB/s: 512 MFLOP/s."""
    text = roofline(report(), 1e12, 1e9)
    assert "In one place, drawn as a: a, d, f" in text
    drawn = "".join(line.split("|", 1)[1] for line in text if "|" in line)
    assert all(letter in drawn for letter in "aceg")
    assert not any(letter in drawn for letter in "df")


def test_the_table_itself_says_what_a_ratio_below_1_means():
    """The output head reads 320 B at 1 GB/s: a floor of 320 ns."""
    sample = Sample([stats(10e-6)], decode_rows(1, 5))
    slow, fast = (explain("a toy", sample, dense_model(), machine(d)) for d in (1.0, 0.4))
    assert "A ratio below 1" not in "\n".join(table(slow))
    # at 0.4 GB/s the floors are 2.5 times as long: 800 ns against 600 measured, 960 against 1,500
    below = next(line for line in table(fast) if line.startswith("A ratio below 1"))
    assert "lm-head" in below
    assert "decode-attention" not in below


def test_rough_rates_are_called_rough():
    sample = Sample([stats(10e-6)], decode_rows(1, 5))
    rough = replace(machine(), measured_at="")
    said = [
        line for line in table(explain("a toy", sample, dense_model(), rough)) if "rough" in line
    ]
    assert said == [
        "Floors come from rough rates taken just now, beside whatever else runs here; `headrace bench "
        "machine` measures them."
    ]
    assert not any("rough" in line for line in table(report()))


def test_a_disturbed_profile_is_said_beside_the_floors_it_gives():
    sample = Sample([stats(10e-6)], decode_rows(1, 5))
    busy = replace(machine(), disturbed={"reading memory": 0.25})
    said = [line for line in table(explain("a toy", sample, dense_model(), busy)) if "25%" in line]
    assert len(said) == 1
    assert said[0].startswith(
        "The machine's profile was disturbed: other programs kept 25% of the CPUs"
    )
    assert not any("disturbed" in line for line in table(report()))


def test_what_the_pool_holds_bounds_the_batches_and_is_said():
    """Five tokens and one more take 2 blocks of 4: 7 blocks hold 3 such sequences, 3 blocks one."""
    sample = Sample([stats(10e-6)], decode_rows(1, 5))

    def said(blocks):
        found = explain("a toy", sample, dense_model(), machine(), room=Room(blocks, 4))
        (line,) = (line for line in found.advice if line.startswith("Batching"))
        return line, [c.name for c in found.software if c.name.endswith("sequences")]

    line, names = said(7)
    assert line.startswith("Batching: 3 times the sequences give ")
    assert "No more fit: the KV pool of 28 tokens holds 3 sequences of 6 (`headrace serve" in line
    assert names == ["2 x the sequences", "3 x the sequences"]
    line, names = said(3)
    assert line.startswith("Batching: the KV pool of 12 tokens holds 1 sequence of 6 (")
    assert names == []
    line, names = said(32)
    assert "KV pool" not in line
    assert names[-1] == "16 x the sequences"


def test_every_smaller_cache_is_a_lever():
    """Heads of 64: a byte in E4M3; NVFP4 keys: half a byte and a 16th of a scale: (32 + 4 + 64) / 128."""
    spec = replace(dense_model().spec, head_dim=64)
    assert kv_choices(spec) == {"f32": 4.0, "bf16": 2.0, "fp8": 1.0, "nvfp4k-fp8v": 0.78125}
    # Groups of 16 channels do not divide heads of 4.
    assert kv_choices(dense_model().spec) == {"f32": 4.0, "bf16": 2.0}
    sample = Sample([stats(10e-6)], decode_rows(1, 5))
    found = explain("a toy", sample, replace(dense_model(), spec=spec, kv_nbytes=2.0), machine())
    names = [change.name for change in found.software]
    assert "--kv-format fp8" in names
    assert "--kv-format nvfp4k-fp8v" in names
    assert "--kv-format f32" not in names
    assert "--kv-format bf16" not in names
