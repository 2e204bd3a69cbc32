"""Whether the texts of a figure are whole: none over the edge of the canvas."""

from matplotlib.text import Text


def texts(figure):
    """Lay a figure out; return (text, its box in pixels) of each that is drawn."""
    figure.draw_without_rendering()
    shown = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    ticks = [tick for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_major_ticks()]
    drawn = {id(label) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in _in_view(axis)}
    hidden = {id(label) for tick in ticks for label in (tick.label1, tick.label2)} - drawn
    return [(text.get_text(), Text.get_window_extent(text)) for text in shown if id(text) not in hidden]


def _in_view(axis):
    """Return the labels of the ticks that lie within the axis: the others are not drawn."""
    low, high = sorted(axis.get_view_interval())
    room = 1e-9 * (high - low)
    inside = [tick for tick in axis.get_major_ticks() if low - room <= tick.get_loc() <= high + room]
    return [label for tick in inside for label in (tick.label1, tick.label2)]


def cut_off(figure):
    """Return the texts that the edge of the canvas cuts."""
    whole = figure.bbox
    return [
        (text, box.extents.round().tolist())
        for text, box in texts(figure)
        if box.x0 < -1 or box.y0 < -1 or box.x1 > whole.x1 + 1 or box.y1 > whole.y1 + 1
    ]
