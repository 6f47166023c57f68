"""What the documentation says is there: links and anchors, commands and options, files and tests, code that compiles.

Pages are parsed, not searched by lines, so that what is code and what is text is told as GitHub tells it.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import click
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from p2ptrain.cli.main import cli
from p2ptrain.cli.options import SettingsCommand
from p2ptrain.protocol.wire.messages import KINDS
from p2ptrain.settings.reference import reference
from p2ptrain.settings.table import SETTINGS

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
    )
)
# Where a reader begins; every page is found from there.
ENTRANCES = ("README.md", "docs/README.md")
SHELL = {"", "sh", "bash", "console", "shell"}
ELLIPSIS = "…"
# What may stand before a command of ours; other lines with our name in them are what a program printed.
WRAPPERS = ("docker", "docker-compose", "python", "nohup")


@dataclass(frozen=True)
class Page:
    """What a page holds that can be checked.

    Attributes:
        links: targets of links and sources of pictures.
        anchors: the ids that GitHub gives its headings.
        fences: language and text of each code block.
        spans: pieces of code in the running text.
    """

    links: tuple[str, ...]
    anchors: frozenset[str]
    fences: tuple[tuple[str, str], ...]
    spans: tuple[str, ...]


@cache
def read(page: str) -> Page:
    tokens = MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text(encoding="utf-8"))
    inline = [child for token in tokens for child in token.children or []]
    return Page(
        links=tuple(str(t.attrGet("href") or t.attrGet("src")) for t in inline if t.type in ("link_open", "image")),
        anchors=frozenset(anchors(tokens)),
        fences=tuple((t.info.strip(), t.content) for t in tokens if t.type == "fence"),
        spans=tuple(t.content for t in inline if t.type == "code_inline"),
    )


def anchors(tokens: list[Token]) -> Iterator[str]:
    """As GitHub makes them: lower case, no punctuation, blanks to hyphens, a number where one comes again."""
    seen: Counter[str] = Counter()
    for opening, heading in pairwise(tokens):
        if opening.type == "heading_open":
            words = "".join(t.content for t in heading.children or [] if t.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            yield f"{slug}-{seen[slug]}" if seen[slug] else slug
            seen[slug] += 1


def inside(page: str) -> Iterator[tuple[str, str]]:
    """The links of a page into this repository: path from its root, and anchor."""
    for link in read(page).links:
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            target = os.path.normpath(Path(page).parent / path) if path else page
            yield target, anchor


def commands(page: str) -> Iterator[list[str]]:
    """What the page has people type, as words: lines of shell blocks, and whole commands in the text."""
    lines = [
        line
        for language, text in read(page).fences
        if language in SHELL
        for line in text.replace("\\\n", " ").splitlines()
    ]
    for line in (*lines, *read(page).spans):
        lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        try:
            for word in (*lexer, ";"):
                if set(word) <= set(";|&<>()"):
                    yield words
                    words = []
                else:
                    words.append(word)
        except ValueError:  # what a program printed, with a quote that does not end
            continue


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in inside(page):
        assert (ROOT / target).exists(), f"{page} links to {target}"
        if anchor:
            assert anchor in read(target).anchors, f"{page} links to {target}#{anchor}"


def test_every_page_is_found_from_the_entrances() -> None:
    found, new = set(ENTRANCES), set(ENTRANCES)
    while new:
        new = {target for page in new for target, _ in inside(page) if target in PAGES} - found
        found |= new
    assert set(PAGES) - found == set()


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist_with_their_options(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # some name files of the repository
    for words in commands(page):
        while words and re.match(r"[A-Z0-9_]+=", words[0]):
            words = words[1:]
        names = [Path(word).name for word in words]
        if "p2ptrain" in names[:-1] and names[0] in ("p2ptrain", *WRAPPERS):
            check_command(words[names.index("p2ptrain") + 1 :], f"{page}: {shlex.join(words)}")


def check_command(words: list[str], where: str) -> None:
    """Parse a command of ours as far as one can without running it; `…` at an argument's place stands for more."""
    command: click.Command = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        assert words[0] in command.commands, where
        command, words = command.commands[words[0]], words[1:]
    given = [word for before, word in pairwise(["", *words]) if word != ELLIPSIS or before[:1] == "-"]
    try:
        context = command.make_context("p2ptrain", given)
    except click.exceptions.Exit:  # --help and --version
        return
    except click.ClickException as error:
        if isinstance(command, click.Group) and not given:
            return
        raise AssertionError(f"{where}: {error.format_message()}") from None
    if isinstance(command, SettingsCommand):
        for name, value in context.params.items():
            if name in SETTINGS and value not in (None, ()):
                SETTINGS[name].parse(value, where)


def test_a_wrong_command_would_be_found() -> None:
    check_command(["join", "--initial-peers", "/ip4/…", "--steps", "5", "…"], "right")
    for wrong in (["jion"], ["join", "--stesp", "5"], ["join", "--steps", "five"], ["peers", "extra"]):
        with pytest.raises((AssertionError, ValueError)):
            check_command(wrong, "wrong")


@pytest.mark.parametrize("page", PAGES)
def test_targets_of_make_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for words in commands(page):
        if words[:1] == ["make"]:
            assert {word for word in words[1:] if "=" not in word} <= targets, f"{page}: {shlex.join(words)}"


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_are_in_their_language(page: str) -> None:
    for language, text in read(page).fences:
        if language == "python":
            compile(text, page, "exec")
        elif language == "toml":
            tomllib.loads(text)


def test_the_program_on_choosing_prints_the_table_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, program),) = (fence for fence in read("docs/choosing.md").fences if fence[0] == "python")
    exec(program, {})
    rows = capsys.readouterr().out
    assert rows.count("\n") == 9
    assert rows in (ROOT / "docs/choosing.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_files_and_tests_that_are_named_exist(page: str) -> None:
    """`p2ptrain/….py`, `tests/….py::test_…`; below `tests/` without saying so where the page says that."""
    for span in read(page).spans:
        if match := re.fullmatch(r"([\w/.-]+\.(?:py|toml|md|yaml|svg|png))(?:::(\w+)(…?))?", span):
            path, name, more = match.groups()
            if "/" not in path and not name:
                continue
            places = [ROOT / path, ROOT / "tests" / path, ROOT / "tests/protocol" / path]
            found = [place for place in places if place.exists()]
            assert found, f"{page} names {path}"
            if name:
                end = r"\w*" if more else r"\b"
                assert re.search(rf"def {name}{end}", found[0].read_text(encoding="utf-8")), f"{page} names {span}"


def test_the_protocol_page_names_every_message_with_its_fields() -> None:
    page = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    for kind, message in KINDS.items():
        fields = ", ".join(message.__struct_fields__)
        assert f"| {kind} | {message.__name__} | {fields} |" in page


def test_the_configuration_page_is_current() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == reference(), "make docs writes it anew"


def test_every_setting_is_on_the_page_and_every_default_has_its_reason() -> None:
    assert re.findall(r"^### (\w+)$", reference(), re.MULTILINE) == list(SETTINGS)
    for setting in SETTINGS.values():
        assert setting.why, setting.name


def test_the_pictures_are_current() -> None:
    pictures = runpy.run_path(str(ROOT / "docs/pictures/draw.py"))["pictures"]()
    for name, text in pictures.items():
        drawn = (ROOT / "docs/pictures" / name).read_text(encoding="utf-8")
        assert drawn == text, f"{name}: make docs draws it anew"
