"""quantization_config: what is read, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.checkpoint.quantization import NONE, read_quantization
from headrace.core.errors import UnsupportedModelError

NV = {"num_bits": 4, "type": "float", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def groups(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "sparsity_config": {},
        "transform_config": {},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize(
    ("given", "formats"),
    [
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, {"mxfp4"}),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, {"fp8_e4m3"}),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, {"fp8_e4m3"}),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, {"nvfp4"}),
        (groups("nvfp4-pack-quantized", NV), {"nvfp4"}),
        (groups("float-quantized", FP8), {"fp8_e4m3"}),
    ],
)
def test_known_methods(given: dict[str, Any], formats: set[str]) -> None:
    found = read_quantization({"quantization_config": given}, None, "config.json")
    assert (found.method, found.formats) == (given["quant_method"], formats)


def test_none_and_modelopts_own_file() -> None:
    assert read_quantization({}, None, "config.json") == NONE
    own = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["x"]}}
    assert read_quantization({}, own, "config.json").formats == {"nvfp4"}


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({}, "quant_method = None"),
        ("fp8", "quantization_config = 'fp8'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
        ({"quant_method": "fp8", "rotation": "hadamard"}, "rotation"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size"),
        (groups("pack-quantized", {"num_bits": 4, "type": "int"}), "'pack-quantized'"),
        (groups("nvfp4-pack-quantized", {**NV, "group_size": 32}), "group_size = 32"),
        (groups("float-quantized", {**FP8, "num_bits": 4}), "weights"),
        ({**groups("float-quantized", FP8), "config_groups": {}}, "config_groups"),
        ({**groups("float-quantized", FP8), "transform_config": {"u": 1}}, "transform_config"),
        ({**groups("float-quantized", FP8), "sparsity_config": {"f": 1}}, "sparsity_config"),
    ],
)
def test_everything_else_is_refused_with_the_list(given: Any, word: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_quantization({"quantization_config": given}, None, "config.json")
    assert word in caught.value.message
    assert "nvfp4-pack-quantized" in str(caught.value.hint)
