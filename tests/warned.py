"""Expected warnings of a call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def said(*messages: str) -> Iterator[None]:
    """One warning with these texts in it; none if there are no texts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(w.message) for w in caught if w.category is UserWarning]
    assert len(texts) == (1 if messages else 0), texts
    for message in messages:
        assert message in texts[0]
