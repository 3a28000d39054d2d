"""The site has every page, and nothing that it would fetch from elsewhere; mkdocs is not needed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax_infer.config.reference import anchor

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


class Loader(yaml.SafeLoader):
    """Takes mkdocs' own tags for what they are called."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda _, tag, node: tag)
SITE: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def entries(nav: list[Any] | dict[str, Any] | str) -> Iterator[str]:
    match nav:
        case str():
            yield nav
        case list():
            for each in nav:
                yield from entries(each)
        case dict():
            for each in nav.values():
                yield from entries(each)


def test_every_page_is_in_the_navigation_once_and_every_entry_is_a_page():
    assert sorted(entries(SITE["nav"])) == sorted(str(p.relative_to(DOCS)) for p in PAGES)


def test_whatever_is_off_fails_the_build():
    assert SITE["strict"] is True
    assert set(SITE["validation"].values()) == {"warn"}


def test_nothing_is_fetched_from_elsewhere():
    assert SITE["theme"]["font"] is False
    assert not SITE.keys() & {"extra_javascript", "extra_css"}
    for page in PAGES:
        assert (
            re.search(r"!\[[^\]]*\]\(https?:|<(?:script|img|link|iframe)\b", page.read_text())
            is None
        )


def test_the_hooks_are_there_and_their_packages_are_pinned():
    pinned = (ROOT / "lock" / "docs.lock").read_text()
    for hook in SITE["hooks"]:
        for name in re.findall(r"^import (\w+)", (ROOT / hook).read_text(), re.MULTILINE):
            assert name == "re" or re.search(rf"^{name}==", pinned, re.MULTILINE)
    assert re.search(r"^mkdocs-material==", pinned, re.MULTILINE)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pinned.splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_headings_are_found_by_the_anchors_that_links_use(page: Path):
    """Two equal headings would get a number from mkdocs and from forges."""
    bare = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = [anchor(title.strip("`")) for title in re.findall(r"^#+ (.+)$", bare, re.MULTILINE)]
    linked = {
        target.partition("#")[2]
        for other in PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", other.read_text())
        if "#" in target and (other.parent / target.partition("#")[0]).name == page.name
    }
    assert not [title for title in linked if titles.count(title) > 1]


# --- the Chinese pages


def fences(page: Path) -> list[str]:
    return re.findall(r"^```.*?^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def headings(page: Path) -> list[int]:
    bare = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [len(marks) for marks in re.findall(r"^(#+) ", bare, re.MULTILINE)]


def without_comments(block: str) -> str:
    return re.sub(r"\s+#.*", "", block)


TRANSLATED = sorted(path.name for path in (DOCS / "zh").glob("*.md"))


def test_the_pages_that_must_be_there_in_chinese_are():
    assert {"quickstart.md", "operating.md"} <= set(TRANSLATED)


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_translation_has_the_same_commands_and_the_same_sections(name: str):
    there, here = DOCS / name, DOCS / "zh" / name
    said = [without_comments(block) for block in fences(there)]
    assert [without_comments(block) for block in fences(here)] == said
    assert headings(here) == headings(there)


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_translation_has_every_row_and_every_word_of_code(name: str):
    there, here = (DOCS / name).read_text(), (DOCS / "zh" / name).read_text()
    rows = [
        [line.count(" | ") for line in text.splitlines() if line.startswith("| ")]
        for text in (there, here)
    ]
    assert rows[0] == rows[1]
    code = [
        sorted(re.findall(r"`[^`\n]+`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
        for text in (there, here)
    ]
    assert code[0] == code[1]
