"""A score to start from: the gradient in units of the weight it would change.

--grad_filter relative_to_weight --grad_filter_args keep=0.2
"""

from torch import Tensor


def relative_to_weight(grad: Tensor, param: Tensor, eps: float = 1e-3) -> Tensor:
    """Score |g| / (|w| + eps): the entries whose weight would change most in its own units pass.

    Args:
        eps: added to |w|, so that weights near zero do not win everything.
    """
    return grad.abs() / (param.float().abs() + eps)
