"""A mask to start from that knows about diffusion: the threshold depends on the noise level of the batch.

    --grad_filter noise_level --grad_filter_args low=1.0 high=0.3

Early timesteps (little noise) teach detail, late ones composition; their gradients differ in size. This filter keeps a
running size of the gradient for each of four ranges of timesteps and compares an entry with the size usual there.
"""

import torch
from torch import Tensor

from library.grad_filter import GradFilter, GradFilterError, register_filter

RANGES = 4
TRAIN_STEPS = 1000


@register_filter("noise_level", summary="pass entries that are large for the noise level they come from")
class NoiseLevel(GradFilter):
    """Pass |g| >= bound * usual, usual = EMA of RMS(g) over batches of the same range of timesteps.

    The bound goes from ``low`` (no noise) to ``high`` (pure noise). Without timesteps everything is one range.

    Args:
        low, high: bounds at both ends, at least 0. decay: of the running size, in [0, 1).

    State: ``usual``, float32, (4,): 16 bytes for each tensor.
    """

    def __init__(self, low: float = 1.0, high: float = 0.5, decay: float = 0.9):
        if low < 0 or high < 0 or not 0 <= decay < 1:
            raise GradFilterError(
                "noise_level: low and high must be at least 0, decay in [0, 1). Example: low=1.0 high=0.5"
            )
        self.low, self.high, self.decay = low, high, decay

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return {"usual": torch.zeros(RANGES, dtype=torch.float32, device=param.device)}

    def mask(self, grad: Tensor, state: dict[str, Tensor], timesteps: Tensor | None) -> Tensor:
        level = 0.0 if timesteps is None else float(timesteps.float().mean()) / TRAIN_STEPS
        number = min(RANGES - 1, int(level * RANGES))
        size = grad.square().mean().sqrt()
        usual = state["usual"][number]
        usual.copy_(torch.where(usual == 0, size, self.decay * usual + (1 - self.decay) * size))
        return grad.abs() >= (self.low + (self.high - self.low) * level) * usual
