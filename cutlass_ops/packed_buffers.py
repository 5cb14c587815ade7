"""What modules over packed weights share: buffers that keep their bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class PackedBuffers(nn.Module):
    """A module whose buffers are the tensors of packed weights, which move and load as bytes, and whose dtypes stay."""

    _packed: Any

    def _from_buffers(self) -> Any:
        """The packed weights that the buffers hold now, checked."""
        raise NotImplementedError

    def view_buffers(self) -> None:
        """Make :attr:`packed` of the buffers as they are now, and check it: to be called after they were loaded."""
        self._packed = self._from_buffers()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedBuffers:
        module: Any = super()  # torch has no types here
        # Seen as bytes, tensors follow every move and escape every change of dtype.
        module._apply(lambda t: fn(t.view(torch.uint8)).view(t.dtype), recurse)
        self.view_buffers()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # load_state_dict(assign=True) puts other tensors in the buffers' places.
        self.view_buffers()
