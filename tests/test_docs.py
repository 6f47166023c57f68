"""What the documentation says is there: links and anchors, commands and options, files and tests, code that compiles.

Pages are parsed, not searched by lines, so that what is code and what is text is told as GitHub tells it.
"""

from __future__ import annotations

import ast
import errno
import os
import re
import runpy
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from markdown_it import MarkdownIt
from markdown_it.token import Token

from p2ptrain.cli.main import cli
from p2ptrain.cli.options import SettingsCommand
from p2ptrain.protocol.wire.frames import WIRE_VERSION
from p2ptrain.settings.reference import reference
from p2ptrain.settings.table import SETTINGS
from p2ptrain.settings.ticket import parse_ticket, ticket_text
from p2ptrain.training.models import PRESETS as MODELS

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
ENTRANCES = ("README.md", "docs/index.md")
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


# In a text of the package, what is known only when it is printed.
VALUE = "\N{REPLACEMENT CHARACTER}"
# What stands for such a value in a message on a page: an id, a round's status, a number.
EXAMPLE = re.compile(r"Qm…|(?<=^round \d )(?:committed|solo|skipped)\b|-?\d[\d.e+]*(?![\w])")


@cache
def package_texts() -> str:
    """The texts of the package, without docstrings, and of the system's errors; `VALUE` is in place of values."""
    texts = [os.strerror(number) for number in errno.errorcode]
    for path in (ROOT / "p2ptrain").rglob("*.py"):
        for parent in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(parent, ast.Expr):
                for node in ast.iter_child_nodes(parent):
                    if isinstance(node, ast.Constant | ast.JoinedStr):
                        texts += literals(node)
    return "\n".join(texts)


def literals(node: ast.expr) -> list[str]:
    """The texts that a literal can become; where it chooses between literals, one for each."""
    match node:
        case ast.Constant(value=str(text)):
            return [re.sub(r"%[\d.]*[a-z]|\\\d", VALUE, text)]
        case ast.JoinedStr(values=parts):
            return ["".join(chosen) for chosen in product(*map(literals, parts))]
        case ast.FormattedValue(value=ast.IfExp(body=one, orelse=other)):
            return [*literals(one), *literals(other)]
    return [VALUE]


def is_message(quoted: str) -> bool:
    """Whether the package can print it.

    `…` stands for anything. What is in brackets, or after a colon, comma or semicolon, may be a literal of its own.
    """
    pieces = [piece for piece in EXAMPLE.sub(VALUE, quoted).split(ELLIPSIS) if re.search(r"\w", piece)]
    return all(
        is_text(piece) or all(map(is_text, filter(None, re.split(r"[:,;]? \(|^\(|\)[:,;]?|[:,;] ", piece))))
        for piece in pieces
    )


def is_text(piece: str) -> bool:
    """Whether a literal holds the piece. A word may be a value of the literal where two more words are its own."""
    words = piece.strip(" ,;:").split()
    patterns = [re.escape(word).replace(VALUE, rf"(?:{VALUE}|-?\d[\d.]*)") for word in words]
    loose = "[ ]".join(rf"(?:{pattern}|\S*{VALUE}\S*)" for pattern in patterns)
    own = [word for word in words if VALUE not in word]
    return any(
        len(own) == len(kept := [word for word in own if word in found.split()]) or len(kept) > 1
        for found in re.findall(loose, package_texts())
    )


def quoted_messages() -> list[str]:
    """The messages in the first column of the tables of "Messages, and what to do", and in its list."""
    page = (ROOT / "docs/use/operating.md").read_text(encoding="utf-8").partition("## Messages, and what to do")[2]
    cells = re.findall(r"^(?:\| (`.*?) \| |- (`.*))", page, re.MULTILINE)
    return [message for row, item in cells for message in re.findall(r"`(.*?)`", row or item)]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in inside(page):
        assert (ROOT / target).exists(), f"{page} links to {target}"
        if anchor:
            assert anchor in read(target).anchors, f"{page} links to {target}#{anchor}"


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_every_page_is_found_from_the_entrances_within_three_clicks(entrance: str) -> None:
    found = {entrance}
    for _ in range(3):
        found |= {target for page in found for target, _ in inside(page) if target in PAGES}
    assert set(PAGES) - found == set()


def test_the_questions_lead_to_headings() -> None:
    page = (ROOT / "docs/questions.md").read_text(encoding="utf-8")
    questions = re.findall(r"^(\d+)\. \[[^]]+\?[^]]*\]\([\w/.-]+\.md#[\w-]+\)", page, re.MULTILINE)
    assert questions == [str(number) for number in range(1, 26)]


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith(("docs/", "examples/"))])
def test_a_page_begins_with_its_reader_and_ends_with_the_next(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.match(r"# [^\n]+\n\n\*For [^*]+\.\*\n", text), f"{page}: a line *For …* after the title"
    last = text.rstrip("\n").rpartition("\n\n")[2]
    assert re.match(r"Next: .*\[.*\]\(", last), f"{page}: a line Next: … at its end"


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/log/")])
def test_prose_is_wrapped_at_100_columns(page: str) -> None:
    """But for a word that is longer than a line, and pages that are made of the code."""
    if page in ("docs/use/configuration.md", "docs/use/reference.md"):
        return
    source = (ROOT / page).read_text(encoding="utf-8")
    lines, tokens = source.splitlines(), MarkdownIt("commonmark").enable("table").parse(source)
    for opening, inline in pairwise(tokens):
        if opening.type == "paragraph_open" and inline.map:
            long = [line for line in lines[slice(*inline.map)] if len(line) > 100 and " " in line.strip()]
            assert [line for line in long if not line.startswith("![")] == []


def test_tickets_are_those_that_peers_print() -> None:
    words = [
        word for page in PAGES for word in re.findall(r"p2pt1[a-z0-9]{20,}", (ROOT / page).read_text(encoding="utf-8"))
    ]
    assert len(words) >= 3
    assert [ticket_text(parse_ticket(word)) for word in words] == words


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
    ((_, program),) = (fence for fence in read("docs/use/choosing.md").fences if fence[0] == "python")
    exec(program, {})
    rows = capsys.readouterr().out
    assert rows.count("\n") == 9
    assert rows in (ROOT / "docs/use/choosing.md").read_text(encoding="utf-8")


def test_the_table_of_models_is_what_they_have() -> None:
    page = (ROOT / "docs/use/training.md").read_text(encoding="utf-8")
    for name, shape in MODELS.items():
        row = f"| `{name}` | {shape.layers} | {shape.width} | {shape.heads} | {shape.context:,} |"
        assert row in page.splitlines()


def test_the_estimates_on_pages_are_what_the_command_prints() -> None:
    pages = ("docs/use/choosing.md", "examples/pretrain_gpt2.md")
    blocks = [text for page in pages for _, text in read(page).fences if text.startswith("$ p2ptrain estimate ")]
    assert len(blocks) >= 2
    for block in blocks:
        command, _, printed = block.partition("\n")
        result = CliRunner().invoke(cli, shlex.split(command)[2:], catch_exceptions=False)
        assert result.stdout == printed


@pytest.mark.parametrize("page", PAGES)
def test_files_and_tests_that_are_named_exist(page: str) -> None:
    """`p2ptrain/….py`, `tests/….py::test_…`; below `tests/`, or anywhere in `tests/protocol/`, without saying so."""
    for span in read(page).spans:
        if match := re.fullmatch(r"([\w/.-]+\.(?:py|toml|md|yaml|svg|png))(?:::(\w+)(…?))?", span):
            path, name, more = match.groups()
            if "/" not in path and not path.startswith("test_"):
                continue
            places = [ROOT / path, ROOT / "tests" / path, *(ROOT / "tests/protocol").rglob(path)]
            found = [place for place in places if place.exists()]
            assert len(found) == 1, f"{page} names {path}"
            if name:
                end = r"\w*" if more else r"\b"
                assert re.search(rf"def {name}{end}", found[0].read_text(encoding="utf-8")), f"{page} names {span}"


@pytest.mark.parametrize("quoted", quoted_messages())
def test_the_program_has_the_messages_that_are_explained(quoted: str) -> None:
    assert is_message(quoted), "the package has no such text"


def test_a_message_that_the_program_lacks_would_be_found() -> None:
    assert is_message("round 7 committed, contributors: 4")
    for stale in (
        "round 7 landed, contributors: 4",
        "the libp2p daemon (p2pd) died: starting another",
        "x, at last with …",
        "lost Qm…: it went away",
    ):
        assert not is_message(stale), stale


def test_the_tables_of_messages_are_current() -> None:
    made = runpy.run_path(str(ROOT / "docs/message_tables.py"))
    page = (ROOT / "docs/understand/protocol.md").read_text(encoding="utf-8")
    assert page == made["page"](), "make docs writes them anew"
    assert f"| 0 | version: {WIRE_VERSION} |" in page
    assert "| 1 | Hello | run_id, digest, incarnation, role, maddrs, bulk |" in page
    assert page.count("\n| 29 | PairWeights | ") == 1


def test_contributing_names_every_module_of_the_rounds() -> None:
    spans = {name for span in read("CONTRIBUTING.md").spans for name in re.split(r"[/, ]+", span)}
    rounds = ROOT / "p2ptrain/protocol/rounds"
    modules = {path.name for path in rounds.rglob("*.py") if path.name != "__init__.py"}
    assert modules - spans == set()


def test_the_configuration_page_is_current() -> None:
    page = (ROOT / "docs/use/configuration.md").read_text(encoding="utf-8")
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
