"""The catalogue as a whole: bar 04.1 and what every record must hold to."""

import math
from functools import cache

import pytest

from headrace.core.config_library import bundled_model, bundled_names
from headrace.core.errors import ConfigError, InternalError
from headrace.explain.catalogue.evaluate import (
    outputs_of,
    price_of,
    run_checks,
    setting,
    work_of,
)
from headrace.explain.catalogue.expression import symbols_of, unit_of
from headrace.explain.catalogue.load import find_record, load_catalogue
from headrace.explain.catalogue.record import RESOURCE_UNITS, Catalogue
from headrace.explain.catalogue.shape import values_of_plan
from headrace.explain.catalogue.units import parse_unit
from headrace.explain.leaf import LEAVES
from headrace.machine.known import known_machine
from headrace.machine.profile import MachineProfile
from tests.fixtures.flop_class_ids import PAGE_IDS

# Two figures of the page count as equal within this: it rounds to two digits in places.
PAGE_ROUNDING = 0.025


@cache
def catalogue() -> Catalogue:
    return load_catalogue()


def test_04_1_every_class_of_the_page_is_there_and_more():
    assert len(PAGE_IDS) == 165
    assert set(PAGE_IDS) <= set(catalogue().records)
    assert len(set(catalogue().records) - set(PAGE_IDS)) >= 5
    assert set(LEAVES) <= set(catalogue().records)


def test_04_1_every_check_and_every_case_holds():
    results = run_checks(catalogue())
    assert len(results) > 200
    assert [r for r in results if not r.holds] == []


def test_04_1_no_record_stores_a_bound():
    known = ("tensor", "hbm", "compute", "memory", "interconnect")
    for record in catalogue().records.values():
        assert not [name for name in vars(record) if "bound" in name]
        assert not [v for v in vars(record).values() if v in known and v != record.category]


def test_formulas_are_in_the_resources_unit():
    units = catalogue().symbols.units
    for record in catalogue().records.values():
        for resource, formula in record.work.items():
            assert unit_of(formula, units) == parse_unit(RESOURCE_UNITS[resource]), record.id
        for formula in record.outputs.values():
            unit_of(formula, units)
        for check in record.checks:
            unit_of(check.expr, units)


def test_formulas_name_declared_symbols_only():
    known = set(catalogue().symbols.by_name)
    for record in catalogue().records.values():
        for formula in record.formulas.values():
            assert symbols_of(formula) <= known, record.id
        if record.rule is not None:
            assert symbols_of(record.rule.expr) <= set(record.rule.inputs), record.id
            assert len(record.rule.cases) >= 1


def test_everything_is_finite_in_every_profile():
    symbols = catalogue().symbols
    for name in symbols.profiles:
        at = setting(symbols, name)
        for record in catalogue().records.values():
            priced = price_of(record, at)
            assert math.isfinite(priced.floor_s), (record.id, name)
            assert priced.floor_s >= 0
            assert all(math.isfinite(v) for v in outputs_of(record, at).values()), (record.id, name)


def test_records_are_complete():
    for record in catalogue().records.values():
        assert record.title
        assert record.about
        assert 0 < record.confidence <= 1
        assert record.status in ("verified", "draft", "contested")
        assert record.profile in catalogue().symbols.profiles
        assert record.sources or record.kind == "note", record.id
        assert record.checks or record.kind != "formula", record.id
        assert record.id not in record.leans_on


def test_where_the_page_is_wrong_the_record_says_so():
    wrong: set[str] = set()
    for result in run_checks(catalogue()):
        if result.page is not None and not math.isclose(
            result.got, result.page, rel_tol=PAGE_ROUNDING
        ):
            wrong.add(result.record)
            assert catalogue().records[result.record].correction, result
    assert len(wrong) >= 20


def test_most_leaned_on_come_first():
    counts = [len(users) for users in catalogue().leaned_on().values()]
    assert counts == sorted(counts, reverse=True)
    assert next(iter(catalogue().leaned_on())) == "decode-gemm"


@pytest.mark.parametrize(
    ("profile", "bound"),
    [("dense_decode", "hbm"), ("dense_prefill", "tensor"), ("offload", "pcie")],
)
def test_the_bound_follows_the_numbers(profile: str, bound: str):
    record = catalogue().records["fct-batch1-step-cost-formula"]
    assert price_of(record, setting(catalogue().symbols, profile)).bound == bound


def test_launches_in_a_graph_cost_what_the_machine_says():
    """400 nodes of 1.5 us on a catalogued chip, as plans have them; of 0.8 us on the examples' H100."""
    record = catalogue().records["step-launches"]
    chip = setting(catalogue().symbols, machine=known_machine("rtx-4090"))
    assert price_of(record, chip).floor_s == pytest.approx(400 * 1.5e-6)
    assert price_of(record, setting(catalogue().symbols)).floor_s == pytest.approx(400 * 0.8e-6)


def test_a_record_is_found_by_a_part_of_its_id():
    assert find_record(catalogue(), "flops/decode-gemm").id == "decode-gemm"
    assert find_record(catalogue(), "cpu-expert").id == "cpu-expert-matvec"
    with pytest.raises(ConfigError, match="no FLOP class") as error:
        find_record(catalogue(), "attention")
    assert "did you mean" in str(error.value)


def test_settings_refuse_what_is_no_symbol():
    for name in ("nonsense", "P_attn", "mac"):
        with pytest.raises(ConfigError, match="no symbol that can be set"):
            setting(catalogue().symbols, values={name: 1})
    with pytest.raises(ConfigError, match="no profile"):
        setting(catalogue().symbols, "nothing")


def test_a_machine_without_a_link_prices_what_needs_none():
    symbols = catalogue().symbols
    full = symbols.machines["h100"]
    bare = MachineProfile(
        name="bare",
        origin="catalogued",
        host=full.host,
        gpu=full.gpu,
        rates={k: v for k, v in full.rates.items() if k not in ("link", "pcie_h2d", "dram_read")},
    )
    at = setting(symbols, machine=bare)
    assert "link" not in at.values
    assert price_of(catalogue().records["dense-ffn"], at).bound == "hbm"
    with pytest.raises(InternalError, match="has no value"):
        work_of(catalogue().records["cpu-expert-matvec"], {"mac": 2})


@pytest.mark.parametrize("name", bundled_names())
def test_a_model_s_symbols_add_up_to_its_weights_and_bytes(name: str):
    """What a token multiplies with (DeepSeek-V3: 37 billion, not the 83 that 128 full heads of 512 would be),
    and what a step reads."""
    spec = bundled_model(name).spec()
    at = setting(catalogue().symbols, values=values_of_plan(spec)).values
    counts, nbytes = spec.weights(), spec.nbytes()
    norms = counts["norm"]
    assert at["P_tok"] + at["P_head"] == pytest.approx(spec.active_weights - norms, rel=1e-9)
    chosen = spec.moe_layers * spec.num_experts_per_token * spec.expert_weights
    experts = chosen * spec.bits("experts") / 8  # without biases
    dense = sum(nbytes[kind] for kind in ("attention", "dense", "shared", "router"))
    head = nbytes["embedding" if spec.tied else "lm_head"]
    assert at["W_step"] == pytest.approx(dense + head + experts, rel=1e-6)


def test_latent_attention_has_the_model_s_own_widths():
    """GLM-5.2: 64 heads of 192 + 64 and of 256, a latent of 512 + 64; an index of 32 heads of 128."""
    at = setting(catalogue().symbols, values=values_of_plan(bundled_model("glm-5.2").spec())).values
    widths = {"r_kv": 512, "r_rope": 64, "d_nope": 192, "d_v": 256}
    index = {"h_idx": 32, "d_idx": 128, "keep": 2048}
    assert {name: at[name] for name in (*widths, *index)} == widths | index
    # scores over 576 elements and values over 512, a multiply-add each, for each of 64 heads and 1,024 keys
    assert 2 * at["mac"] * at["n_q"] * at["d_h"] * 1024 == 2 * 64 * (576 + 512) * 1024


def test_a_latent_cache_keeps_one_vector_and_recurrent_layers_none():
    def values(name: str):
        return setting(
            catalogue().symbols, values=values_of_plan(bundled_model(name).spec())
        ).values

    # 512 + 64 elements in bfloat16 for each token and layer (DeepSeek-V3's technical report)
    deepseek = values("deepseek-v3")
    assert deepseek["kv_el"] == pytest.approx(2 * (512 + 64))
    assert deepseek["kv_rd"] == pytest.approx(1024 * 61 * 2 * (512 + 64))
    mla = catalogue().records["mla-latent-attention"]
    assert work_of(mla, deepseek).hbm_nbytes == deepseek["kv_rd"]  # two ways to the same bytes
    # a quarter of 40 layers attends: 2 heads of 256, keys and values; the others keep a state
    qwen = values("qwen3.6-35b-a3b")
    assert qwen["kv_rd"] == 1024 * 10 * 2 * 2 * 256 * 2
    assert qwen["n_ssm"] == 30
    assert qwen["n_layers"] == 40
    assert values("llama-3-8b")["kv_rd"] == 1024 * 131072
