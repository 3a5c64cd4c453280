"""Hooks of mkdocs: pages and figures outside this folder, and formulas as MathML.

README, notebooks, figures and the benchmarks page stay at their place in the repository; links between them work both
there and in the site.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
BESIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "notebooks/*.ipynb", "benchmarks/README.md")
FIGURES = ("benchmarks/results/**/*.png", "benchmarks/results/**/*.svg")
# Files of the repository that are not pages: shown by name, without a link.
_NO_PAGE = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)[^)\s]*?(?:\.py|\.cff|\.json|results/[a-z]+)\)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.+?)\\[)\]]</\1>', re.DOTALL)
# Notebooks hold formulas as they were typed; code is not changed.
_CODE = re.compile(r"(<pre.*?</pre>|<script.*?</script>|<style.*?</style>)", re.DOTALL)
_TYPED = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", re.DOTALL)


@event_priority(100)  # before the plugin that looks for notebooks
def on_files(files: Any, config: Any) -> Any:
    """Add pages and figures of other folders, under their names in the repository."""
    for pattern in (*BESIDE, *FIGURES):
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if files.get_file_from_path(name) is None:
                files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links of the repository into links of the site, where docs/ is the root."""
    name = page.file.src_uri
    markdown = _NO_PAGE.sub(r"`\1`", markdown)
    if "/" not in name and (ROOT / name).exists():  # README, CHANGELOG, CONTRIBUTING: docs/x.md is x.md
        return markdown.replace("](docs/", "](")
    if name.startswith(("benchmarks/", "notebooks/")):
        return markdown.replace("](../docs/", "](../")
    return markdown.replace("](../", "](")


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Turn formulas into MathML, which browsers render without a script."""
    if page.file.src_uri.endswith(".ipynb"):
        parts = _CODE.split(content)
        parts[::2] = [_TYPED.sub(lambda found: _drawn(found[1] or found[2], bool(found[1])), one) for one in parts[::2]]
        return "".join(parts)
    return _FORMULA.sub(lambda found: _drawn(found[2], found[1] == "div"), content)


def _drawn(formula: str, on_its_own: bool) -> str:
    return convert(html.unescape(formula), display="block" if on_its_own else "inline")
