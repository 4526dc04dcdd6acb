"""The Hugging Face hub: a fake library, and the cache's layout on disk."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headrace.checkpoint.hub import HubReference, choose_files, parse_reference
from headrace.checkpoint.hub_cache import cache_folder
from headrace.checkpoint.open import open_checkpoint, resolve_ref
from headrace.cli.plan_source import read_model
from headrace.core.errors import MachineError, ModelNotFoundError
from tests.fixtures import toy
from tests.fixtures.gguf_bytes import tiny_llama


class OfflineModeIsEnabled(ConnectionError):
    """Named like the library's."""


class LocalEntryNotFoundError(FileNotFoundError):
    """Named like the library's."""


class RepositoryNotFoundError(Exception):
    """Named like the library's."""


class GatedRepoError(RepositoryNotFoundError):
    """Named like the library's."""


class FakeHub(ModuleType):
    """``huggingface_hub`` with repositories in memory, or a failure in place of every call."""

    def __init__(self, cache: Path, repos: dict[str, dict[str, bytes]]) -> None:
        super().__init__("huggingface_hub")
        self.cache, self.repos = cache, repos
        self.listing_fails: Exception | None = None
        self.download_fails: Exception | None = None
        self.downloaded: list[str] = []

    def HfApi(self) -> Any:
        hub = self

        class Api:
            def model_info(self, repo: str, *, timeout: float) -> Any:
                assert timeout > 0
                if hub.listing_fails is not None:
                    raise hub.listing_fails
                files = [SimpleNamespace(rfilename=name) for name in hub.repos[repo]]
                return SimpleNamespace(siblings=files)

        return Api()

    def snapshot_download(
        self, repo: str, *, allow_patterns: list[str], tqdm_class: Any = None
    ) -> str:
        if self.download_fails is not None:
            raise self.download_fails
        folder = self.cache / ("models--" + repo.replace("/", "--"))
        files = self.repos[repo]
        wanted = [f for f in files if any(fnmatch.fnmatch(f, p) for p in allow_patterns)]
        if tqdm_class is not None:
            count = tqdm_class(total=len(wanted), desc="Fetching", name="hub")
            size = tqdm_class(total=sum(len(files[f]) for f in wanted), unit="B", unit_scale=True)
        for name in wanted:
            path = folder / "snapshots" / "c1" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[name])
            self.downloaded.append(name)
            if tqdm_class is not None:
                size.update(len(files[name]))
                count.update(1)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text("c1")
        if tqdm_class is not None:
            count.close()
            size.close()
        return str(folder / "snapshots" / "c1")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = toy.write_qwen3_moe(tmp_path / "made")
    files = {f.name: f.read_bytes() for f in made.path.iterdir()}
    extra = {"original/model.safetensors": b"copy", "README.md": b"", "model.bin": b""}
    tiny = tiny_llama().to_bytes()
    repos = {
        "org/toy": {**files, **extra},
        "org/quants": {
            "README.md": b"",
            "config.json": b"{}",
            "tiny-Q4_K.gguf": tiny,
            "tiny-Q4_K_M.gguf": tiny,
            "Q8_0/tiny-Q8_0-00001-of-00002.gguf": tiny,
            "Q8_0/tiny-Q8_0-00002-of-00002.gguf": tiny,
        },
        "org/single": {"model.gguf": tiny},
        "org/pickle": {"pytorch_model.bin": b"", "config.json": b"{}"},
    }
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    fake = FakeHub(cache, repos)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_references() -> None:
    assert parse_reference("org/name") == HubReference("org/name")
    assert parse_reference("org/a.b_c-1:Q4_K_M") == HubReference("org/a.b_c-1", quant="Q4_K_M")
    assert parse_reference("o/n/d/f.gguf") == HubReference("o/n", file="d/f.gguf")
    for ref in (
        "name",
        "./o/n",
        "/o/n",
        "o/n/x",
        "o/n/../f.gguf",
        "o/../n",
        "o n/x",
        "o/n:",
        "~/o",
    ):
        assert parse_reference(ref) is None


def test_a_directory_is_fetched_without_what_is_not_needed(hub: FakeHub) -> None:
    seen: list[tuple[str, float]] = []
    checkpoint = open_checkpoint("org/toy", progress=lambda s, f: seen.append((s, f)))
    assert checkpoint.spec.family == "qwen3_moe"
    assert checkpoint.text.tokenizer_json is not None
    assert "config.json" in hub.downloaded
    for name in ("original/model.safetensors", "README.md", "model.bin"):
        assert name not in hub.downloaded
    fractions = [f for s, f in seen if s == "download"]
    assert fractions == sorted(fractions)  # bytes alone, not mixed with the count of files
    assert fractions[-1] == 1.0
    assert seen[-1] == ("open", 1.0)


@pytest.mark.parametrize(
    ("ref", "file"),
    [
        ("org/single", "model.gguf"),
        ("org/quants:Q4_K", "tiny-Q4_K.gguf"),
        ("org/quants:q4_k_m", "tiny-Q4_K_M.gguf"),
        ("org/quants/tiny-Q4_K.gguf", "tiny-Q4_K.gguf"),
        ("org/quants:Q8_0", "Q8_0/tiny-Q8_0-00001-of-00002.gguf"),
        ("org/quants/Q8_0/tiny-Q8_0-00001-of-00002.gguf", "Q8_0/tiny-Q8_0-00001-of-00002.gguf"),
    ],
)
def test_gguf_files_are_chosen_by_name_or_quantisation(hub: FakeHub, ref: str, file: str) -> None:
    path = resolve_ref(ref)
    assert path.as_posix().endswith("snapshots/c1/" + file)
    assert path.is_file()
    assert len(hub.downloaded) == (2 if "Q8_0" in ref else 1)  # a split whole, and nothing else


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("org/quants", ("3 GGUF models", "name one: org/quants/")),
        ("org/quants:Q2_K", ("no GGUF file for Q2_K", "tiny-Q4_K.gguf")),
        ("org/quants/none.gguf", ("none.gguf", "tiny-Q4_K.gguf")),
        ("org/pickle", ("no weights", "no .gguf files")),
    ],
)
def test_what_a_repository_does_not_offer(hub: FakeHub, ref: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_ref(ref)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("where", ["listing_fails", "download_fails"])
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: OfflineModeIsEnabled("offline"),
            MachineError,
            ("org/toy is not in the cache", "HF_HUB_OFFLINE", "local directory"),
        ),
        (
            lambda: ConnectionError("Name or service not known"),
            MachineError,
            ("cannot be fetched", "Name or service not known", "try again", "local directory"),
        ),
        (lambda: TimeoutError(), MachineError, ("TimeoutError", "network")),
        (
            lambda: RepositoryNotFoundError("404"),
            ModelNotFoundError,
            ("no model 'org/toy'", "spelling"),
        ),
        (lambda: GatedRepoError("403"), ModelNotFoundError, ("gated", "hf auth login")),
    ],
)
def test_failures_are_told_and_not_thrown(
    hub: FakeHub,
    where: str,
    make: Callable[[], Exception],
    error: type[Exception],
    words: tuple[str, ...],
) -> None:
    setattr(hub, where, make())
    with pytest.raises(error) as caught:
        resolve_ref("org/toy")
    for word in (*words, "hint: "):
        assert word in str(caught.value)


def test_offline_is_recognised_behind_the_librarys_own_error(hub: FakeHub) -> None:
    error = LocalEntryNotFoundError("not on disk")
    error.__cause__ = OfflineModeIsEnabled("offline")
    hub.listing_fails = error
    with pytest.raises(MachineError, match="HF_HUB_OFFLINE is set"):
        resolve_ref("org/toy")


def test_without_a_network_the_cache_answers(hub: FakeHub) -> None:
    online = resolve_ref("org/toy")
    single = resolve_ref("org/single")
    hub.listing_fails = OfflineModeIsEnabled("offline")
    hub.downloaded.clear()
    assert resolve_ref("org/toy") == online
    assert resolve_ref("org/single/model.gguf") == single
    assert hub.downloaded == []


def test_the_real_library_says_the_same_offline(tmp_path: Path) -> None:
    gguf = tmp_path / "models--org--here" / "snapshots" / "c1" / "tiny.gguf"
    gguf.parent.mkdir(parents=True)
    gguf.write_bytes(tiny_llama().to_bytes())
    code = """
from headrace.checkpoint.open import resolve_ref
from headrace.core.errors import HeadraceError
print(resolve_ref("org/here"))
try:
    resolve_ref("org/missing")
except HeadraceError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={
            "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
            "HF_HUB_CACHE": str(tmp_path),
            "HF_HUB_OFFLINE": "1",
            "HOME": str(tmp_path),
        },
    )
    found, refused = done.stdout.split("\n", 1)
    assert found == str(gguf)
    assert refused.startswith("MachineError org/missing is not in the cache")
    assert "unset HF_HUB_OFFLINE" in refused
    assert "Traceback" not in done.stderr


def test_names_are_patterns_that_fit_only_themselves() -> None:
    files = ["a[1]*.gguf", "a1x.gguf"]
    assert choose_files(HubReference("o/n", file="a[1]*.gguf"), files) == ["a[1]*.gguf"]


def test_the_cache_folder_follows_the_librarys_variables(tmp_path: Path) -> None:
    home = Path.home() / ".cache" / "huggingface" / "hub"
    assert cache_folder({}) == home
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert cache_folder({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}) == Path("/h/hub")
    assert cache_folder({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}) == Path("/c")


def test_a_plan_downloads_the_configuration_alone(hub: FakeHub) -> None:
    spec = read_model("org/toy")
    assert hub.downloaded == ["config.json"]
    assert spec.name == "toy"
    assert spec.num_experts == json.loads(hub.repos["org/toy"]["config.json"])["num_experts"]
    hub.download_fails = OfflineModeIsEnabled("offline")
    assert read_model("org/toy") == spec  # from the cache
    with pytest.raises(MachineError, match="HF_HUB_OFFLINE"):
        read_model("org/quants")
    assert read_model("openai/gpt-oss-20b").name == "gpt-oss-20b"  # bundled, without the hub


def test_a_repository_without_a_configuration_cannot_be_planned(hub: FakeHub) -> None:
    hub.repos["org/single"]["hf_quant_config.json"] = b"{}"
    with pytest.raises(ModelNotFoundError, match="has no config"):
        read_model("org/single")
