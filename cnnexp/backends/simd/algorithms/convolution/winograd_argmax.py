"""`winograd-argmax`: the forward pass as `winograd`, gradients through the argmax as `channels-argmax`."""

from __future__ import annotations

from cnnexp.backends.simd.algorithms.convolution.channels_argmax import ChannelsArgmax
from cnnexp.backends.simd.algorithms.convolution.winograd import Winograd


class WinogradArgmax(Winograd, ChannelsArgmax):
    """3 x 3 convolution of stride 1 by Winograd's algorithm, gradients through the argmax of the max-pool after it."""

    algorithm = "winograd-argmax"
