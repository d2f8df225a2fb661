"""Faults of the built site that a reader would notice, found in its HTML."""

import ast
import os
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

# Markdown that stayed text: links, emphasis, code, comments, lists, tables.
MARKDOWN = ("](", "][", "**", "`", "<!--", "\n- ", "\n* ", "| --", "|--")
WIDTH = 88  # of signatures, as in mkdocs.yml
LITERAL = {"code", "pre", "kbd", "script", "style"}
VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}


class Page(HTMLParser):
    """The text outside of code, links, anchors, menu entries and signatures of an HTML file."""

    def __init__(self, file):
        super().__init__()
        self.text, self.links, self.anchors = [], set(), set()
        self.parts = {"md-nav__link": [], "md-tabs__link": [], "doc-signature": []}
        self._open = []  # (tag, its classes that are in parts)
        self.feed(file.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs[name] for name in ("id", "name") if name in attrs}
        self.links |= {attrs[name] for name in ("href", "src") if attrs.get(name)}
        inside = self.parts.keys() & (attrs.get("class") or "").split()
        for name in inside:
            self.parts[name].append("")
        if tag not in VOID:
            self._open.append((tag, inside))

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if not any(tag in LITERAL for tag, _ in self._open):
            self.text.append(data)
        for name in set().union(*(inside for _, inside in self._open)):
            self.parts[name][-1] += data


def is_whole(signature):
    """Return whether Python can parse a signature with all its defaults."""
    name, bracket, rest = signature.strip().partition("(")
    function = bracket and name.replace(".", "").isidentifier()
    try:
        tree = ast.parse(f"def f({rest}: pass" if function else signature.strip())
    except SyntaxError:
        return False
    values = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            values += node.defaults + node.kw_defaults
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            values.append(node.value)
    cut = any(isinstance(value, ast.Constant) and value.value is ... for value in values)
    return not cut and max(map(len, signature.splitlines())) <= WIDTH


def find_faults(folder):
    """Return (page, kind, what) of every fault in a built site."""
    pages = {file: Page(file) for file in sorted(folder.rglob("*.html"))}
    faults = []
    for file, page in pages.items():
        name = file.relative_to(folder).as_posix()
        for text in page.text:
            faults += [(name, "markdown", text) for mark in MARKDOWN if mark in text]
        for link in sorted(page.links):
            if not _exists(link, file, folder, pages):
                faults.append((name, "link", link))
        for entry in page.parts["md-nav__link"] + page.parts["md-tabs__link"]:
            if entry.strip() in ("", "None", "Table"):
                faults.append((name, "menu", entry))
        for signature in page.parts["doc-signature"]:
            if not is_whole(signature):
                faults.append((name, "signature", signature))
    return faults


def _exists(link, file, folder, pages):
    """Return whether a link goes elsewhere, or to a file and an anchor of this site."""
    link = urlsplit(link)
    if link.scheme or link.netloc:
        return True
    place = folder if link.path.startswith("/") else file.parent
    target = place / unquote(link.path).lstrip("/") if link.path else file
    target = type(file)(os.path.normpath(target))
    target = target / "index.html" if target.is_dir() else target
    if link.fragment and target in pages:
        return unquote(link.fragment) in pages[target].anchors
    return target.is_file()
