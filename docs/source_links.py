"""Let pages link to the repository's files: a hook of mkdocs.

A link such as `../configs/study` works on GitHub and has no page in the site. There it becomes the
address of the file if `repo_url` is set, and otherwise its text alone; a notebook has one in Colab
beside it. A file that does not exist is a warning, which ends a strict build.
"""

import logging
import os
import re
from pathlib import Path
from typing import Any

logger = logging.getLogger("mkdocs.hooks.source_links")

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return the page with its links to files outside of `docs_dir` replaced."""
    docs = Path(config["docs_dir"])

    def replace(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = Path(os.path.normpath(docs / Path(page.file.src_path).parent / target))
        if path.is_relative_to(docs):
            return link[0]
        if not path.exists():
            logger.warning("%s links to %s, which does not exist", page.file.src_path, target)
        if not config["repo_url"]:
            return text
        kind = "tree" if path.is_dir() else "blob"
        address = f"{config['repo_url']}/{kind}/main/{path.relative_to(docs.parent)}"
        if path.suffix != ".ipynb":
            return f"[{text}]({address}{anchor})"
        colab = address.replace("github.com", "colab.research.google.com/github")
        return f"[{text}]({address}) ([open in Colab]({colab}))"

    return LINK.sub(replace, markdown)
