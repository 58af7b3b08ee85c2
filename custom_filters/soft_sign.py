"""A transform to start from: large entries are compressed, small ones keep their size.

--grad_filter soft_sign --grad_filter_args scale=2.0
"""

from torch import Tensor

from library.grad_filter import GradFilter, GradFilterError, register_filter


@register_filter("soft_sign", summary="compress entries beyond a multiple of the tensor's RMS")
class SoftSign(GradFilter):
    """Give g / (1 + |g| / (scale * RMS(g))): nearly g for small entries, nearly +-scale * RMS for large ones.

    Args:
        scale: where compression begins, in units of the root mean square; above 0.
    """

    def __init__(self, scale: float = 2.0):
        if scale <= 0:
            raise GradFilterError(f"soft_sign: scale must be above 0, got {scale}. Example: scale=2.0")
        self.scale = scale

    def transform(self, grad: Tensor) -> Tensor:
        bound = self.scale * grad.square().mean().sqrt()
        return grad / (1.0 + grad.abs() / bound)
