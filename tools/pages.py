"""The site's pages as browsers show them without a script; MkDocs calls this file as a hook.

Formulas become MathML: pymdownx.arithmatex has put each one, as TeX, into an element of class
"arithmatex". The roles of docstrings (``:func:`` and others before a name) become links.
"""

from __future__ import annotations

import re
from html import unescape

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):\s*<code>([^<]*)</code>")


def mathml(match: re.Match[str]) -> str:
    """A formula of a page."""
    from latex2mathml.converter import convert

    tag, tex = match.groups()
    formula = convert(unescape(tex), display="block" if tag == "div" else "inline")
    return f'<{tag} class="arithmatex">{formula}</{tag}>'


def on_page_content(html: str, **_: object) -> str:
    """Return a page as browsers show it.

    Args:
        html: the page, with formulas as TeX and docstrings' roles.
    """
    places = set(re.findall(r'id="(cutlass_ops\.[^"]*)"', html))

    def link(match: re.Match[str]) -> str:
        name = match[1].lstrip("~")
        place = name if name.startswith("cutlass_ops.") else f"cutlass_ops.{name}"
        code = f"<code>{name}</code>"
        return f'<a href="#{place}">{code}</a>' if place in places else code

    return ROLE.sub(link, FORMULA.sub(mathml, html))
