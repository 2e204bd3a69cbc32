"""How the kernels of `two_conv` cut up a network: what a block makes, and what of it lies in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cnnexp.backends.gpu.device import SIMULATED
from cnnexp.backends.gpu.fused.conv_kernels import ACROSS, ConvBlock, in_fours
from cnnexp.backends.gpu.fused.linear_kernels import lanes_of
from cnnexp.backends.gpu.fused.nodes import Context
from cnnexp.network import LinearStage

THREADS = 16 if SIMULATED else 512  # of a block
MOST_SUMS = 32  # accumulators of a thread
AHEAD = 16  # weights of the first linear layer that a thread asks for before it waits for the first, at most
BANKS = 32  # of shared memory
RESIDENT = 2  # blocks that a multiprocessor holds for sure


@dataclass(frozen=True)
class Cut:
    """The network, and how its kernels cut it up.

    Attributes:
        first, second: the convolutions; the second has stride 1, and the pooling after it.
        hidden, outputs: of the linear layers.
        relu: whether a ReLU is between them.
        biases: whether they have them.
        rows: of pooled outputs of a tile.
        batch: images of a step, at most.
        slices: of the batch, backward.
    """

    first: ConvBlock
    second: ConvBlock
    hidden: int
    outputs: int
    relu: bool
    biases: tuple[bool, bool]
    rows: int
    batch: int
    slices: int

    @property
    def tiles(self) -> int:
        return -(-self.second.U // self.rows)

    @property
    def features(self) -> int:
        return self.second.U * self.second.V * self.second.sizes.F

    @property
    def map_rows(self) -> int:
        """Rows of the map that the second convolution sees."""
        sizes = self.second.sizes
        return min(sizes.H, sizes.P + sizes.K - 1 - sizes.top)

    @property
    def map_columns(self) -> int:
        sizes = self.second.sizes
        return min(sizes.W, sizes.Q + sizes.K - 1 - sizes.left)

    @property
    def pitch(self) -> int:
        """From row to row of the map in shared memory: four numbers are read at once, neighbours from other banks."""
        S, V, wide = self.second.pool, self.second.V, in_fours(self.second.wide)
        return min(range(wide, wide + BANKS, 4), key=lambda pitch: (S * (pitch - V) % BANKS + pitch - wide, pitch))

    # forward

    @property
    def high(self) -> int:
        """Rows of the map under a tile."""
        return self.second.input_rows(self.rows)

    @property
    def plane(self) -> int:
        return self.high * self.pitch

    @property
    def image_rows(self) -> int:
        sizes = self.first.sizes
        return (self.high - 1) * sizes.stride + sizes.K

    @property
    def map_quads(self) -> int:
        """Groups of pixels in a row of the map, each of a thread."""
        return -(-self.second.wide // ACROSS)

    @property
    def image_columns(self) -> int:
        sizes = self.first.sizes
        return (self.map_quads * ACROSS - 1) * sizes.stride + sizes.K

    @property
    def filters(self) -> int:
        """Of the second convolution, that a thread makes."""
        return largest_factor(self.second.sizes.F, min(4, max(1, MOST_SUMS // self.second.pool**2)))

    @property
    def neighbours(self) -> int:
        """Windows side by side that a thread makes."""
        return largest_factor(self.second.V, min(2, max(1, MOST_SUMS // (self.filters * self.second.pool**2))))

    @property
    def filter_groups(self) -> int:
        return self.second.sizes.F // self.filters

    @property
    def cells(self) -> int:
        """Groups of neighbours in a tile."""
        return self.rows * self.second.V // self.neighbours

    @property
    def channel_groups(self) -> int:
        """Into how many parts the sum over channels is shared out among threads."""
        items = min(self.cells, THREADS // self.filter_groups) * self.filter_groups
        return largest_factor(self.second.sizes.C, max(1, min(4, THREADS // items)))

    @property
    def abreast(self) -> int:
        """Cells of a block at once."""
        return min(self.cells, THREADS // self.channel_groups // self.filter_groups)

    @property
    def sums(self) -> int:
        """Numbers that threads hand each other."""
        parts = (self.channel_groups - 1) * self.filters * self.neighbours * self.second.pool**2
        return max(parts * self.abreast * self.filter_groups, THREADS * self.hidden_together)

    @property
    def shared_forward(self) -> int:
        """Numbers in shared memory."""
        first, second = self.first.sizes, self.second.sizes
        image = self.image_rows * self.image_columns * first.C
        weights = in_fours(first.K**2 * first.C * first.F) + in_fours(second.K**2 * second.C * second.F)
        return image + in_fours(first.F * self.plane) + weights + self.sums + self.padded_features

    @property
    def hidden_together(self) -> int:
        """Hidden outputs of a thread."""
        return largest_factor(self.hidden, 2)

    @property
    def linear_lanes(self) -> int:
        return largest_factor(self.hidden // self.hidden_together, THREADS)

    @property
    def linear_parts(self) -> int:
        """Threads that share out the features of one hidden output."""
        return THREADS // self.linear_lanes

    @property
    def linear_each(self) -> int:
        """Features of one of them."""
        return -(-self.rows * self.second.V * self.second.sizes.F // self.linear_parts)

    @property
    def padded_features(self) -> int:
        """Of a tile, so that all threads take as many."""
        ahead, turns = at_once(self.linear_each)
        return ahead * turns * self.linear_parts

    # backward

    @property
    def owned_rows(self) -> int:
        """Rows of the map whose gradient a tile makes."""
        return -(-self.map_rows // self.tiles)

    @property
    def extents(self) -> tuple[int, int]:
        """Rows of the map, and of pooled outputs, that a tile needs backward, at most."""
        sizes, S, rows, needed = self.second.sizes, self.second.pool, 0, 0
        for tile in range(self.tiles):
            u, low = tile * self.rows, tile * self.owned_rows + sizes.top
            high = low + self.owned_rows
            rows = max(rows, max(u * S + self.high, high) - min(u * S, low))
            first, last = max(low - (sizes.K - 1), 0) // S, min(high - 1, sizes.P - 1) // S
            needed = max(needed, max(u + self.rows, last + 1) - min(u, first))
        return rows, needed

    @property
    def map_shape(self) -> tuple[int, int]:
        """Rows and columns of an image's map in memory, padded, so that tiles are copied as they are."""
        low = (self.tiles - 1) * self.owned_rows + self.second.sizes.top
        return min((self.tiles - 1) * self.rows * self.second.pool, low) + self.extents[0], self.pitch

    @property
    def backward_plane(self) -> int:
        """From channel to channel of the map: 8 banks on, so that neighbouring windows of four channels do not meet."""
        size = self.extents[0] * self.pitch
        return size + (BANKS // 4 - size) % BANKS

    @property
    def across(self) -> int:
        """Pixels in a row of the map whose gradients a thread makes."""
        return min((6, 4), key=lambda across: -self.map_columns % across)

    @property
    def spans(self) -> int:
        """Groups of so many in a row."""
        return -(-self.map_columns // self.across)

    @property
    def gradient_items(self) -> int:
        """Groups of pixels, of two channels if there are, in the rows that a tile owns."""
        return self.owned_rows * self.spans * (self.second.sizes.C // largest_factor(self.second.sizes.C, 2))

    @property
    def sharers(self) -> int:
        """Threads that share out the filters of one item."""
        return largest_factor(self.second.sizes.F, max(1, min(4, THREADS // self.gradient_items)))

    @property
    def spread(self) -> tuple[int, int]:
        """Rows and columns of the gradient of the second convolution's outputs, spread out in shared memory."""
        K = self.second.sizes.K
        return self.owned_rows + K - 1, in_fours(self.spans * self.across + K - 1)

    @property
    def image_backward(self) -> tuple[int, int]:
        """Rows and columns of the image under the rows of the map that a tile owns."""
        sizes = self.first.sizes
        columns = -(-self.map_columns // ACROSS) * ACROSS
        return (self.owned_rows - 1) * sizes.stride + sizes.K, (columns - 1) * sizes.stride + sizes.K

    @property
    def owners(self) -> tuple[int, int]:
        """Threads that each own a row of K weights, of the first and the second convolution."""
        first, second = self.first.sizes, self.second.sizes
        return first.K * first.C * first.F, second.K * second.C * second.F

    @property
    def groups(self) -> tuple[int, int]:
        """Threads that share out the places of one owner."""
        first, second = self.owners
        return min(self.owned_rows, THREADS // first), min(self.rows * self.second.V, THREADS // second)

    @property
    def room(self) -> int:
        """Numbers for the spread gradient, or for sums over threads."""
        high, broad = self.spread
        K = max(self.first.sizes.K, self.second.sizes.K)
        handed = (self.sharers - 1) * self.gradient_items * self.across * largest_factor(self.second.sizes.C, 2)
        return in_fours(max(self.second.sizes.F * high * broad, (K + 1) * THREADS, handed))

    @property
    def shared_backward(self) -> int:
        first, second = self.first.sizes, self.second.sizes
        high, broad = self.image_backward
        head = 2 * in_fours(self.hidden + AHEAD) + 2 * lanes_of(self.outputs)
        weights = in_fours(second.K**2 * second.C * second.F)
        own = 2 * self.rows * self.second.V * second.F
        return first.F * self.backward_plane + self.room + weights + in_fours(high * broad * first.C) + own + head


@dataclass(frozen=True)
class Places:
    """Where things lie in the arena.

    First, image by image, the outputs and gradients that `update` multiplies; then convolutions' partial gradients.
    """

    features: int
    hidden: int
    d_hidden: int
    d_scores: int
    first_w: int
    first_b: int
    second_w: int
    second_b: int


def largest_factor(number: int, most: int) -> int:
    """Return the largest factor of a number that is at most `most`."""
    return next(factor for factor in range(most, 0, -1) if number % factor == 0)


def at_once(count: int) -> tuple[int, int]:
    """Return (loads on their way at once, turns) for `count` of them, or a few more."""
    ahead = largest_factor(count, AHEAD)
    if ahead < AHEAD // 2:
        ahead = -(-count // -(-count // AHEAD))
    return ahead, -(-count // ahead)


def plan(
    first: ConvBlock, second: ConvBlock, linears: Sequence[LinearStage], relu: bool, context: Context
) -> Cut | None:
    """Return how to cut up a network; None if a tile does not fit in shared memory or in a block's registers."""
    batch, multiprocessors, sizes = context.batch_size, context.gpu.multiprocessors, second.sizes
    hidden, outputs = (stage.weight.shape[1] for stage in linears)
    if first.pool > 1 or sizes.stride > 1 or max(sizes.top, sizes.left) >= sizes.K or second.pool**2 > MOST_SUMS:
        return None
    biases = (linears[0].bias is not None, linears[1].bias is not None)
    cuts = []
    for rows in range(1, second.U + 1):
        slices = min(batch, max(RESIDENT * multiprocessors // -(-second.U // rows), 1))
        cut = Cut(first, second, hidden, outputs, relu, biases, rows, batch, slices)
        if (
            max(outputs, *cut.owners) <= THREADS
            and max(cut.shared_forward, cut.shared_backward) <= context.shared_floats
        ):
            cuts.append(cut)

    def work_of_the_busiest(cut: Cut) -> int:
        """Return the rows of the map that the multiprocessor with most blocks makes."""
        return -(-batch * cut.tiles // multiprocessors) * cut.high

    return min(cuts, key=work_of_the_busiest, default=None)
