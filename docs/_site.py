"""Hooks of the site (`mkdocs.yml`): what a forge shows by itself and a folder of files does not."""

import re
from typing import Any

import mermaidx

_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OUTSIDE = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+(?!zh/)[\w./-]+)(#[\w-]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """State diagrams become pictures; links to what is not in docs/ lead to the repository, or,
    where none is named, are the name of the file alone."""
    depth = page.file.src_uri.count("/") + 1

    def outside(link: re.Match[str]) -> str:
        words, target = link[1], link[2]
        if target.count("../") < depth:
            return link[0]
        path = target.replace("../", "")
        if config.repo_url:
            return f"[{words}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        return f'<span title="{path}">{words}</span>' if words.startswith("`") else words

    drawn = 0

    def draw(fence: re.Match[str]) -> str:
        nonlocal drawn
        drawn += 1
        # Every picture calls itself the same; on one page their styles would meet. And its words
        # were measured in another font: a wider one must not be cut off.
        name = f"diagram-{drawn}"
        picture = mermaidx.render(fence[1]).svg().replace("my-svg", name)
        wide = f"<style>#{name} foreignObject{{overflow:visible}}"
        picture = picture.replace("<style>", wide, 1)
        one_line = " ".join(picture.split("\n"))  # Markdown would end it at an empty line
        return f'<div style="background: #fff; overflow: auto">{one_line}</div>'

    return _DIAGRAM.sub(draw, _OUTSIDE.sub(outside, markdown))
