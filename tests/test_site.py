"""The site builds without a warning, its links and anchors hold, it loads nothing from other hosts, and it shows what
GitHub shows of each page."""

from __future__ import annotations

import os
import re
import runpy
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from markdown_it import MarkdownIt

import p2ptrain
from tests.test_docs import PAGES, ROOT

OTHERS = ("CHANGELOG.md", "SECURITY.md")
# What Markdown makes of a page, of which the two programs that read it must find the same.
BLOCKS = ("h1", "h2", "h3", "li", "ol", "ul", "pre", "table", "tr", "img")
build = runpy.run_path(str(ROOT / "docs/build_site.py"))["build"]


class Html(HTMLParser):
    """What a page of the site refers to, and what its text is made of.

    Attributes:
        links: where its links lead.
        loads: the files that a browser loads with it.
        ids: what links can lead to in it.
        blocks: how many there are of each element of its text.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.blocks: Counter[str] = Counter()
        self._in_text = "<article" not in text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("img", "script", "link", "source", "iframe"):
            self.loads += [given[name] for name in ("src", "href", "srcset") if name in given]
        self._in_text |= tag == "article"
        if self._in_text and tag in BLOCKS:
            self.blocks[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self._in_text = False


def place(page: str) -> str:
    """Where the site has a page."""
    return "index.html" if page == "README.md" else str(Path(page).with_suffix(".html"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    folder: Path = tmp_path_factory.mktemp("built") / "site"
    build(folder)
    return folder


@pytest.fixture(scope="module")
def site(built: Path) -> dict[str, Html | None]:
    """The files of the site; those that are pages, read."""
    files = [path for path in built.rglob("*") if path.is_file()]
    return {
        path.relative_to(built).as_posix(): Html(path.read_text(encoding="utf-8")) if path.suffix == ".html" else None
        for path in files
    }


def test_links_of_the_site_lead_somewhere(site: dict[str, Html | None]) -> None:
    dead = []
    for name, page in site.items():
        # What is served in the place of a missing page does not know where it is.
        if page is not None and name != "404.html":
            for link in (*page.links, *page.loads):
                parts = urlsplit(link)
                if not parts.scheme and not parts.netloc:
                    path = os.path.normpath(Path(name).parent / unquote(parts.path)) if parts.path else name
                    target = site.get("index.html" if path == "." else path)
                    wanted = unquote(parts.fragment)
                    if path not in (".", *site) or (wanted and target and wanted not in target.ids):
                        dead.append(f"{name}: {link}")
    assert dead == []
    assert len(site) > 100


def test_the_site_loads_nothing_from_other_hosts(site: dict[str, Html | None], built: Path) -> None:
    loads = {load for page in site.values() if page is not None for load in page.loads}
    assert {load for load in loads if re.match(r"([a-z]+:)?//", load)} == set()
    assert any(load.endswith(".css") for load in loads)
    styles = "".join(path.read_text(encoding="utf-8") for path in built.rglob("*.css"))
    assert "url(" in styles
    assert re.findall(r"""(?:url\(|@import)\s*["']?(?:[a-z]+:)?//[^)]*""", styles) == []
    assert "search.json" in site


# The site fills the reference from docstrings.
@pytest.mark.parametrize("page", sorted({*PAGES, *OTHERS} - {"docs/use/reference.md"}))
def test_the_site_shows_what_github_shows(site: dict[str, Html | None], page: str) -> None:
    shown = site[place(page)]
    assert shown is not None
    markdown = MarkdownIt("commonmark").enable("table").render((ROOT / page).read_text(encoding="utf-8"))
    assert dict(shown.blocks) == dict(Html(markdown).blocks)


def test_the_reference_has_what_the_package_exports(site: dict[str, Html | None]) -> None:
    page = site["docs/use/reference.html"]
    assert page is not None
    assert {f"{home}.{name}" for name, home in p2ptrain._HOMES.items()} <= page.ids
    assert "p2ptrain.peer.peer.Peer.step" in page.ids


def test_every_page_has_its_place_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def pages(entry: str | list[object] | dict[str, object]) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]

    assert sorted(pages(config["nav"])) == sorted([*PAGES, *OTHERS])


@pytest.mark.parametrize("link", ["nowhere.md", "README.md#no-such-heading"])
def test_a_link_to_nowhere_ends_the_build(tmp_path: Path, link: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text(f"# A page\n\n[A link]({link})\n", encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text("site_name: one page\ndocs_dir: pages\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        build(tmp_path / "site", tmp_path)
    assert "does not exist" in "".join(capfd.readouterr())
    assert not (tmp_path / "site").exists()
