"""Every file, test and link that pages, docstrings and comments name exists."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT

FOLDERS = "benchmarks|configs|docs|examples|kernels|policies|precision_policies|rllib_llm|tests"
# a path below one of our folders that ends in a file name or a slash, with a test's name behind it
PATH = re.compile(rf"(?<![\w./-])((?:{FOLDERS})/(?:[\w.-]+/)*[\w.-]*\w(?:\.\w+)?/?)(?:::(\w+))?")
MARKDOWN = re.compile(r"(?<![\w./-])((?:[\w.-]+/)*[\w-]+\.md)\b")
# Named like ours, and not files of this repository.
FOREIGN = {
    "kernels/": "another project's name",
    "README.md": "also the card of a registered model",
}
PACKAGES = ("benchmarks", "examples", "kernels", "precision_policies", "rllib_llm", "tests")


@cache
def tracked() -> frozenset[str]:
    """Files and folders of the repository, relative to it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.split()  # fmt: skip
    files = listed or [
        str(path.relative_to(ROOT)) for top in ROOT.iterdir() for path in [top, *top.rglob("*")]
    ]
    folders = {str(parent) for file in files for parent in Path(file).parents}
    return frozenset({file for file in files if (ROOT / file).exists()} | folders)


@cache
def functions(file: str) -> frozenset[str]:
    """Names of the test functions of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring and comment; neighbouring comments are one text."""
    source = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for inner in body if isinstance(body, list) else []:
            text = (
                inner.value.value
                if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant)
                else None
            )
            if isinstance(text, str):
                yield inner.lineno, text
    last, text, start = -2, "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                if text:
                    yield start, text
                text, start = "", token.start[0]
            text, last = f"{text} {token.string.lstrip('# ')}", token.start[0]
    if text:
        yield start, text


def dead(text: str, here: Path) -> Iterator[str]:
    """References in `text`, which stands in the file `here`, to nothing."""
    for match in PATH.finditer(text):
        path, test = match[1].rstrip("/."), match[2]
        if Path(path).stem.isupper():  # kernels/triton/FAMILY.py: a file that the reader makes
            continue
        found = {path, f"{path}.py"} & tracked() or {
            path.replace("precision_kernels/", "kernels/")
        } & tracked()
        if not found and match[1] not in FOREIGN and "*" not in text[match.end() : match.end() + 1]:
            yield match[1]
        elif test and test not in functions(path):
            yield f"{path}::{test}"
    for match in MARKDOWN.finditer(text):
        name = match[1]
        places = {name, f"docs/{name}", f"benchmarks/results/{name}"}
        near = (here.parent / name).resolve()
        if not places & tracked() and not near.exists() and name not in FOREIGN:
            yield name


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_references_of_pages_exist(page: str) -> None:
    """Every path, test and relative link of a page leads somewhere."""
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = list(dead(text, ROOT / page))
    for link in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", text):
        if not re.match(r"[a-z]+:", link) and not ((ROOT / page).parent / link).exists():
            missing.append(link)
    assert missing == []


def test_references_of_docstrings_and_comments_exist() -> None:
    """Every path, test and page that a docstring or a comment names is there."""
    missing = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for line, text in prose(file):
                missing += [f"{file.relative_to(ROOT)}:{line}: {name}" for name in dead(text, file)]
    assert missing == []


def test_results_have_notes() -> None:
    """Each file and folder of benchmarks/results is named in a page or in NOTES.md: nothing lies there unread."""
    folder = ROOT / "benchmarks" / "results"
    texts = "".join(page.read_text(encoding="utf-8") for page in [*PAGES, folder / "NOTES.md"])
    assert [
        path.name for path in folder.iterdir() if path.name not in texts and path.name != "NOTES.md"
    ] == []
