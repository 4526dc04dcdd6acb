"""`headrace flops`."""

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.core.config_library import bundled_model


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["flops", *argv]) == 0
    return capsys.readouterr().out


def test_list_filters(capsys: pytest.CaptureFixture[str]):
    every = json.loads(output(capsys, "list", "--json"))
    assert len(every) == 180
    assert json.loads(output(capsys, "list", "--json", "--status", "contested"))[0][
        "id"
    ].startswith("sd-")
    pcie = json.loads(output(capsys, "list", "--json", "--resource", "pcie", "--bound", "pcie"))
    assert {"expert-fetch"} <= {row["id"] for row in pcie}
    assert all(row["bound"] == "pcie" for row in pcie)
    both = json.loads(output(capsys, "list", "--json", "speculat", "acceptance"))
    assert 0 < len(both) < len(every)
    assert "CLASS" in output(capsys, "list", "router")
    assert output(capsys, "list", "no such words") == ""


def test_show_puts_numbers_in(capsys: pytest.CaptureFixture[str]):
    text = output(capsys, "show", "lm-head", "--set", "V=1000", "--set", "d=100")
    assert "204 kB" in text  # 1000 x 100 bf16 weights, a row of 100 in and 1000 float32 logits out
    data = json.loads(output(capsys, "show", "flops/lm-head", "--json", "--machine", "wafer"))
    assert data["at"]["machine"] == "wafer"
    assert data["leans_on"] == ["decode-gemm", "embedding"]
    rule = output(capsys, "show", "tensor-memory")
    assert "columns in [32, 64, 128, 256, 512]" in rule


def test_show_of_a_real_model(capsys: pytest.CaptureFixture[str]):
    data = json.loads(output(capsys, "show", "moe-routing", "--json", "--model", "tiny"))
    assert data["at"]["flops"] > 0


def test_a_machine_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from headrace.explain.catalogue.load import load_symbols

    load_symbols().machines["h100"].save(tmp_path / "mine.json")
    text = output(capsys, "show", "lm-head", "--machine", str(tmp_path / "mine.json"))
    assert "on h100" in text


def test_check_and_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = json.loads(output(capsys, "check", "--json"))
    assert found["failed"] == []
    assert found["checks"] > 200
    output(capsys, "site", str(tmp_path / "pages"))
    assert (tmp_path / "pages" / "class" / "decode-gemm.html").exists()


@pytest.mark.parametrize(
    "argv",
    [
        ["show", "nonsense"],
        ["show", "lm-head", "--set", "V"],
        ["show", "lm-head", "--set", "nothing=1"],
        ["show", "lm-head", "--machine", "nothing"],
        ["list", "--bound", "nothing"],
        ["list", "--resource", "nothing"],
    ],
)
def test_wrong_input_says_what_is_known(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["flops", *argv]) == 2
    assert "error:" in capsys.readouterr().err


def test_a_bundled_model_on_a_catalogued_machine(capsys: pytest.CaptureFixture[str]):
    argv = ("--model", "gpt-oss-120b", "--machine", "rtx-4090", "--set", "offl=1", "--json")
    data = json.loads(output(capsys, "show", "expert-fetch", *argv))
    # 36 layers of 4 experts of 24,883,200 weights in MXFP4; three quarters missing, half of them fetched
    assert data["at"]["nbytes"]["pcie"] == pytest.approx(36 * 4 * 24883200 * 17 / 32 * 0.375)
    assert data["at"]["bound"] == "pcie"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["show", "lm-head", "--set", "V=nan"], "at least 0"),
        (["show", "lm-head", "--set", "V=inf"], "at least 0"),
        (["show", "lm-head", "--set", "V=-5"], "at least 0"),
        (["list", "--set", "L=-5"], "at least 0"),
        (["show", "lm-head", "--set", "V=5", "--set", "V=6"], "twice"),
        (["show", "lm-head", "--set", "v=5"], "'v' is no symbol"),
        (["show", "rmsnorm", "--set", "topk=4"], "no formula of rmsnorm uses 'topk'"),
        (["show", "rmsnorm", "--set", "T=4"], "follows from others"),
        (["show", "rmsnorm", "--set", "mac=4"], "no formula"),
        (["show", "decode-attention", "--set", "n_kv=0"], "divides by zero"),
        (["list", "--set", "n_kv=0"], "divides by zero"),
        (["show", "attention"], "more have 'attention' in their id"),
    ],
)
def test_numbers_that_cannot_be_put_in_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["flops", *argv]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "hint:" in said.err
    assert said.out == ""


def test_huge_numbers_are_no_fault(capsys: pytest.CaptureFixture[str]):
    for name in ("B", "L", "q"):
        code = main(["flops", "list", "--json", "--set", f"{name}=1e300"])
        said = capsys.readouterr()
        assert code in (0, 2), said.err
        if code == 0:
            json.loads(said.out, parse_constant=pytest.fail)


def test_ids_are_printed_whole(capsys: pytest.CaptureFixture[str]):
    ids = [row["id"] for row in json.loads(output(capsys, "list", "--json"))]
    lines = output(capsys, "list").splitlines()[1:]
    assert [line.split()[0] for line in lines] == ids


def test_a_machine_without_a_gpu_computes_on_its_cpu(capsys: pytest.CaptureFixture[str]):
    argv = ("show", "moe-experts", "--model", "gpt-oss-20b", "--machine", "ddr5-5600-dual")
    at = json.loads(output(capsys, *argv, "--json"))["at"]
    # 24 layers of 4 experts of 24,883,200 weights in MXFP4, at 2 x 8 bytes x 5.6 GT/s; 48 wakes of 10 us
    assert at["seconds"]["dram"] == pytest.approx(24 * 4 * 24883200 * 17 / 32 / 89.6e9)
    assert at["floor_s"] == pytest.approx(at["seconds"]["dram"] + 48 * 10e-6)
    assert at["bound"] == "dram"
    text = output(capsys, *argv)
    assert "desktop, two channels of DDR5-5600: the CPU computes" in text
    assert text.count("<- binds") == 1


def test_a_class_of_several_gpus_is_not_priced_without_one(capsys: pytest.CaptureFixture[str]):
    words = ("show", "tensor-parallel-allreduce", "--machine", "ddr5-5600-dual")
    text = output(capsys, *words)
    assert "not priced on ddr5-5600-dual: the machine has no GPU" in text
    assert "no GPU" in json.loads(output(capsys, *words, "--json"))["at"]["not_priced"]


def test_what_moves_no_bytes_is_said_in_words(capsys: pytest.CaptureFixture[str]):
    text = output(capsys, "show", "flashattention-4-blackwell-tmem")
    assert "no bytes are moved" in text
    assert "inf" not in text.split()


def test_the_setting_says_what_was_changed(capsys: pytest.CaptureFixture[str]):
    assert main(["flops", "show", "decode-attention", "--set", "L=131072", "--set", "k_b=0.5"]) == 0
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("WORK")]
    assert ", with L = 131,072, with k_b = 0.5" in line
    assert main(["flops", "show", "decode-attention", "--set", "ZZ=1"]) == 2
    assert "--set ZZ: 'ZZ' is no symbol" in capsys.readouterr().err


def test_a_mixture_that_vram_does_not_hold_is_fetched(capsys: pytest.CaptureFixture[str]):
    words = ["flops", "show", "expert-fetch", "--model", "gpt-oss-120b", "--machine"]
    assert main([*words, "rtx-4090", "--set", "hit=0.5", "--set", "f_cpu=0"]) == 0
    text = capsys.readouterr().out
    assert "gpt-oss-120b, 0.56 bytes a weight, experts in host memory, with hit = 0.5" in text
    # 36 layers of 4 experts, 17 / 32 bytes a weight, half of them miss: 0.95 GB
    assert f"{36 * 4 * 3 * 2880 * 2880 * 17 / 32 * 0.5 / 1e6:.0f} MB" in text
    assert main([*words, "h200"]) == 0
    assert "experts in host memory" not in capsys.readouterr().out
    assert main([*words, "rtx-4090", "--set", "offl=0"]) == 0
    assert "experts in host memory" not in capsys.readouterr().out


def test_whatever_is_planned_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A config.json alone is enough; heads that are set count beside a model's other numbers."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(bundled_model("llama-3-8b").config), encoding="utf-8")
    argv = ("show", "qkv-projection", "--model", str(file), "--machine", "h200", "--json")
    data = json.loads(output(capsys, *argv))
    assert data["at"]["flops"] == 2 * 32 * 4096 * (32 + 2 * 8) * 128
    data = json.loads(output(capsys, *argv, "--set", "n_kv=32"))
    assert data["at"]["flops"] == 2 * 32 * 4096 * 3 * 32 * 128


def test_latent_attention_projects_with_its_own_matrices(capsys: pytest.CaptureFixture[str]):
    """DeepSeek-V3: 7,168 to 1,536 to 128 heads of 192, and to 512 + 64, from there 128 heads of 256."""
    layer = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256
    argv = ("show", "qkv-projection", "--model", "deepseek-v3", "--machine", "h200", "--json")
    assert json.loads(output(capsys, *argv))["at"]["flops"] == 2 * 61 * layer


def test_widths_that_a_model_does_not_have_are_an_example_s(capsys: pytest.CaptureFixture[str]):
    words = ("show", "mla-latent-attention", "--machine", "h200", "--model")
    said = [
        line for line in output(capsys, *words, "llama-3-8b").splitlines() if "example's" in line
    ]
    assert [line.split()[0] for line in said] == ["r_kv", "r_rope"]
    assert "example's" not in output(capsys, *words, "deepseek-v3")
    assert "example's" not in output(capsys, "show", "mla-latent-attention")
