"""The catalogue's pages: whole, linked, and without anything from elsewhere."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from headrace.explain.catalogue.load import load_catalogue
from headrace.explain.catalogue.roofline import Point, roofline_svg
from headrace.explain.catalogue.site import catalogued_machines, write_site

VOID = {"meta", "input", "br", "circle", "path"}


class Balance(HTMLParser):
    """Collects links, and complains about tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("site")
    assert write_site(load_catalogue(), where) == len(load_catalogue().records) + 2
    return where


def test_every_page_is_well_formed_and_every_link_leads_somewhere(folder: Path):
    for file in folder.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        page = Balance()
        page.feed(text)
        assert page.open == [], file
        for link in page.links:
            assert (file.parent / link).exists(), (file, link)
        assert "http://" not in text.replace("http://www.w3.org", "")


def test_the_index_lists_every_class_and_can_be_searched(folder: Path):
    text = (folder / "index.html").read_text(encoding="utf-8")
    rows = re.findall(r'<tr data-id="([^"]+)">', text)
    assert rows == list(load_catalogue().records)
    assert 'type="search"' in text
    assert "Leaned on most" in text
    assert text.count("<select") == 3


def test_each_machine_has_a_picture(folder: Path):
    text = (folder / "machines.html").read_text(encoding="utf-8")
    known = catalogued_machines()
    assert len(known) > 15
    assert text.count("<svg") == 2 * len(load_catalogue().symbols.machines) + len(known)


def test_the_roof_bends_at_the_ridge():
    machine = load_catalogue().symbols.machines["h100"]
    svg = roofline_svg(machine, [Point("at the ridge", 989.5 / 3.35, 989.5e12)])
    bend = re.search(r'class="roof" d="M[\d. ]+L([\d.]+) ([\d.]+)H', svg)
    dot = re.search(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)
    assert bend is not None
    assert dot is not None
    assert bend.groups() == dot.groups()


def test_points_beyond_the_picture_look_different():
    machine = load_catalogue().symbols.machines["h100"]
    inside, beyond = Point("inside", 1.0, 1e12), Point("beyond", 1.0, 1e6)  # from 100 GFLOP/s on
    svg = roofline_svg(machine, [inside, beyond])
    assert [c == ' class="edge"' for c in re.findall(r'r="4"( class="edge")?>', svg)] == [
        False,
        True,
    ]
