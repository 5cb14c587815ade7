"""Formulas of the site as MathML, which browsers draw without a script.

MkDocs calls this file as a hook. pymdownx.arithmatex has put each formula of a page, as TeX, into
an element of class "arithmatex".
"""

from __future__ import annotations

import re
from html import unescape

FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>',
    re.DOTALL,
)


def on_page_content(html: str, **_: object) -> str:
    """Return a page with its formulas as MathML.

    Args:
        html: the page, whose formulas are TeX.
    """
    from latex2mathml.converter import convert

    def mathml(match: re.Match[str]) -> str:
        tag, tex = match.groups()
        formula = convert(unescape(tex), display="block" if tag == "div" else "inline")
        return f'<{tag} class="arithmatex">{formula}</{tag}>'

    return FORMULA.sub(mathml, html)
