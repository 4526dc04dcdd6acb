"""The Hugging Face cache on disk, read without the hub's library (importing it takes 1 s).

::

    <cache>/models--ORG--NAME/refs/main                 the commit that "main" stood for
    <cache>/models--ORG--NAME/snapshots/<commit>/...    its files, links into ../../blobs

Source: huggingface_hub's documentation, "Understand caching".
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

_PREFIX = "models--"


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where the hub's library keeps its downloads, by the same variables in the same order."""
    env = os.environ if environ is None else environ
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if env.get(name):
            return Path(env[name]).expanduser()
    if env.get("HF_HOME"):
        return Path(env["HF_HOME"]).expanduser() / "hub"
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]).expanduser() / "huggingface" / "hub"
    return Path.home() / ".cache" / "huggingface" / "hub"


def find_snapshot(repo: str, cache: Path) -> Path | None:
    """The folder of a repository's files: what "main" stood for last, else the newest."""
    folder = cache / (_PREFIX + repo.replace("/", "--"))
    snapshots = folder / "snapshots"
    try:
        commit = (folder / "refs" / "main").read_text().strip()
        if commit and (snapshots / commit).is_dir():
            return snapshots / commit
    except (OSError, UnicodeDecodeError):
        pass  # no such reference: any snapshot will do
    found = [p for p in snapshots.glob("*") if p.is_dir()]
    return max(found, key=lambda p: p.stat().st_mtime, default=None)


def cached_repositories(cache: Path) -> Iterator[tuple[str, Path]]:
    """Repository ids and snapshot folders of every model in the cache."""
    if not cache.is_dir():
        return
    for folder in sorted(cache.glob(_PREFIX + "*--*")):
        repo = folder.name.removeprefix(_PREFIX).replace("--", "/", 1)
        snapshot = find_snapshot(repo, cache)
        if snapshot is not None:
            yield repo, snapshot
