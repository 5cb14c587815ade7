"""huggingface_hub's ``PyTorchModelHubMixin``: importing this module lets it refuse to
save packed modules.

It is imported as soon as both packages are (see ``registration.py``); a user need not. The mixin
would save packed tensors, make a float model of the class, and load the tensors with equal names
into it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from huggingface_hub.hub_mixin import PyTorchModelHubMixin

from ..nn.buffers import PackedState


def _register() -> None:
    save = PyTorchModelHubMixin._save_pretrained

    @functools.wraps(save)
    def refusing(self: Any, save_directory: Path) -> None:
        if names := [
            name for name, module in self.named_modules() if isinstance(module, PackedState)
        ]:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise ValueError(
                f"the layers {', '.join(names[:8])}{more} are packed, and "
                f"{type(self).__name__}.from_pretrained makes float "
                "ones: save the float model, or keep this one by torch.save(model.state_dict(), "
                "file), for load_state_dict "
                "of a model that was packed in the same way"
            )
        save(self, save_directory)

    PyTorchModelHubMixin._save_pretrained = refusing  # type: ignore[method-assign]


_register()
