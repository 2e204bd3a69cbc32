"""`winograd-argmax`: the forward pass of `winograd`, and gradients through the argmax as in `channels-argmax`.

Gain: many channels before a max-pool. The second one of Keras's MNIST convnet takes 508,511 cycles for 633,138.
"""

from cnnexp.backends.simd.algorithms.convolution.channels_argmax import ChannelsArgmax
from cnnexp.backends.simd.algorithms.convolution.winograd import Winograd


class WinogradArgmax(Winograd, ChannelsArgmax):
    """Convolution by Winograd's algorithm, gradients through the argmax of the max-pool after it."""

    algorithm = "winograd-argmax"
