"""Why one training step is faster than another: their parts side by side, and sentences made from these numbers.

A side is a run as its profile has it (`ledger.report`), or the baseline that was timed beside it. Fused backends
compute several layers at once, so both sides are brought to the finest groups of layers that each of them reports.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cnnexp.measuring.ledger import BETWEEN, CALLS, STEP
from cnnexp.measuring.roofline import roofs
from cnnexp.system.table import rounded

LARGEST = 4  # differences that are worth a sentence
WORTH = 0.02  # share of the slower step from which a difference is
FEWER = 1.05  # ratio of multiply-adds from which they are called fewer
SUMMED = ("us", "multiply_adds", "flops", "bytes")  # of the pieces that are one on the other side
LAYOUT = (".rows", ".lanes")  # ends the name of what changes the layout of a layer's input
OTHERS = {"wait": "waiting for threads", "gather": "gathering the batch", "update": "updating the parameters"}


def plain_name(what: str, layers: Sequence[str]) -> str:
    """Return e.g. `conv1 relu1 forward`; `waiting for threads` of what is no layer's."""
    return OTHERS[what] if what in OTHERS else " ".join((*map(_plain_layer, layers), what))


def _plain_layer(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    return f"layout for {layer}" if f".{kind}" in LAYOUT else name


class Piece(NamedTuple):
    """A part of a step, of one image: a pass of layers computed at once, or no layer's. See `backends.parts.Part`."""

    what: str
    layers: tuple[str, ...]
    us: float  # microseconds
    multiply_adds: float = 0.0  # 0 where they, and flops and bytes, are not known, or there are none
    flops: float = 0.0
    bytes: float = 0.0
    at_once: str = ""
    fewer: str = ""

    @property
    def name(self) -> str:
        return plain_name(self.what, self.layers)

    def gflops(self) -> float:
        return self.flops / self.us / 1e3


class Side(NamedTuple):
    """A training step."""

    label: str  # e.g. `cpu-simd`
    threads: int  # that computed it
    device: str  # the GPU that computed it; empty on a CPU
    us: float  # microseconds an image, by the clock of the epochs
    pieces: tuple[Piece, ...]  # in the order of the step; empty where only the whole was timed
    limits: Mapping[str, float]  # `roofline.machine_limits`; empty where they were not measured for these threads
    ways: Mapping[str, str]  # by layers, which of several to compute them was taken
    disturbed: str  # how other work disturbed the run; empty where it did not

    @property
    def accounted(self) -> float:
        """Share of the step that its pieces are."""
        return sum(piece.us for piece in self.pieces) / self.us


class Row(NamedTuple):
    """A part of both steps; a side that has no such part has None there."""

    name: str
    pieces: tuple[Piece | None, ...]


def side_of(profile: Mapping[str, Any], label: str | None = None) -> Side:
    """Return the step of a run, from its profile, or of the baseline beside it, from `profile["baseline"]`."""
    images = profile["images"]
    pieces = []
    for layer in profile.get("layers", ()):
        numbers = {key: layer[key] / images for key in ("multiply_adds", "flops", "bytes")}
        more = {key: layer[key] for key in ("at_once", "fewer")}
        pieces.append(Piece(layer["pass"], tuple(layer["layers"]), 1e6 * layer["seconds"] / images, **numbers, **more))
    known = {(piece.what, piece.layers) for piece in pieces}
    for entry in profile["entries"]:
        what, layers = entry["what"], tuple(entry["layer"].split())
        if pieces and what in STEP and (what, layers) not in known:
            what, layers = (BETWEEN, ()) if what == CALLS else (what, layers)
            pieces.append(Piece(what, layers, 1e6 * entry["seconds"] / images))
    return Side(
        label or profile["backend"],
        profile["threads"],
        profile.get("device", ""),
        profile["us_per_image"],
        tuple(sorted(pieces, key=_place)),
        profile["machine"],
        profile.get("ways", {}),
        profile.get("disturbed", ""),
    )


def sides_of(profile: Mapping[str, Any]) -> list[Side]:
    """Return the step of a run and, where it had one, its baseline's."""
    return [side_of(side) for side in (profile, profile.get("baseline")) if side]


def rows(sides: Sequence[Side]) -> list[Row]:
    """Return the parts of the steps beside each other, in the order of the first side's step."""
    # of each layer those that some piece computes with it, and theirs, in order
    groups: dict[str, tuple[str, ...]] = {}
    for layers in sorted((piece.layers for side in sides for piece in side.pieces), key=len, reverse=True):
        joined = tuple(dict.fromkeys(name for layer in layers for name in groups.get(layer, (layer,))))
        groups |= dict.fromkeys(joined, joined)
    merged = [_merge(side, groups) for side in sides]
    keys = dict.fromkeys(key for pieces in merged for key in pieces)
    return [Row(plain_name(*key), tuple(pieces.get(key) for pieces in merged)) for key in keys]


def sentences(sides: Sequence[Side]) -> list[str]:
    """Say why the first side takes less than the second, or more; of one side alone, where its time goes."""
    ours, *others = sides
    found = []
    if others:
        where = [side.device or f"{side.threads} thread{'s' if side.threads > 1 else ''}" for side in sides]
        costs = " and ".join(f"{s.label} on {on} {us_text(s.us)}" for s, on in zip(sides, where, strict=True))
        found = [f"An image costs {costs}: {_times(ours.us, others[0].us)}.", *changes(sides)]
    if ours.pieces:
        found.append(_what_is_left(ours))
        if ours.ways:
            ways = ", ".join(f"{layers} by `{way}`" for layers, way in ours.ways.items())
            found.append(f"The algorithms that {ours.label} chose, of those in docs/kernels.md: {ways}.")
        found += [f"{side.label}'s run was {side.disturbed}." for side in sides if side.disturbed]
        found.append(f"These parts are {ours.accounted:.1%} of the step as the epochs' own clock has it.")
    return found


def changes(sides: Sequence[Side]) -> list[str]:
    """Say of the parts that differ most between two sides by how much and why; nothing of one side alone."""
    if len(sides) < 2:
        return []
    ours, theirs = sides
    pairs = [(a, b) for a, b in (row.pieces for row in rows(sides)) if a and b and a.what != BETWEEN]
    worth = [(a, b) for a, b in pairs if abs(b.us - a.us) >= WORTH * max(ours.us, theirs.us)]
    worth.sort(key=lambda pair: -abs(pair[1].us - pair[0].us))
    return [_change(a, b, ours, theirs) for a, b in worth[:LARGEST]]


def _change(a: Piece, b: Piece, ours: Side, theirs: Side) -> str:
    """Say how a part differs from the other side's, and what is known of why."""
    went = "fell" if a.us < b.us else "rose"
    text = f"{_possessive(a)} {went} from {us_text(b.us)} to {us_text(a.us)} an image, {_times(a.us, b.us)}"
    reasons = []
    if a.fewer and a.multiply_adds and b.multiply_adds > FEWER * a.multiply_adds:
        reasons.append(f"{rounded(b.multiply_adds / a.multiply_adds)} times fewer multiply-adds, since {a.fewer}")
    if a.at_once and not b.at_once:
        reasons.append(f"{a.at_once} compute at once" if ours.device else f"an instruction takes {a.at_once} at once")
    if ours.threads > theirs.threads:
        reasons.append(f"{ours.threads} threads instead of {theirs.threads}")
    return f"{text}: {'; '.join(reasons)}." if went == "fell" and reasons else f"{text}."


def _what_is_left(side: Side) -> str:
    """Say where most of a step goes, and what bounds it."""
    largest = max((piece for row in rows([side]) for piece in row.pieces if piece), key=lambda piece: piece.us)
    text = f"Most of {side.label}'s step is {largest.name}, {largest.us / side.us:.0%}: {us_text(largest.us)}"
    if largest.flops and largest.bytes and side.limits:
        intensity, speed, most = largest.flops / largest.bytes, largest.gflops(), side.limits["gflops"]
        text += f" at {rounded(speed)} GFLOP/s, "
        allowed = {where: min(most, intensity * width) for where, width in roofs(side.limits).items()}
        where = next((where for where, limit in allowed.items() if speed <= limit), None)
        nearest, roof = next(iter(allowed.items()))
        if where is None:
            text += f"more than the {rounded(max(allowed.values()))} that was measured as the limit here"
        elif where != nearest:
            text += f"more than the {rounded(roof)} that {nearest} allows: much of what it reads is in the caches; "
        if where is not None:
            bound = "arithmetic" if allowed[where] == most else where if where == nearest else f"the {where}"
            text += f"{speed / allowed[where]:.0%} of the {rounded(allowed[where])} that {bound} allows here"
        text += f" ({intensity:.3g} FLOP a byte)"
    return f"{text}."


def _place(piece: Piece) -> int:
    """Return where a piece comes in a step; equal ones stay in their order, the network's, or its reverse."""
    if piece.layers == ("loss",):
        return 2
    return {"gather": 0, "forward": 1, "backward": 3, "update": 4, "wait": 5}.get(piece.what, 6)


def _merge(side: Side, groups: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, tuple[str, ...]], Piece]:
    """Return a side's pieces by pass and group; what a group's pieces do is added up."""
    merged: dict[tuple[str, tuple[str, ...]], Piece] = {}
    for piece in side.pieces:
        group = groups[piece.layers[0]] if piece.layers else ()
        key = piece.what, group
        before = merged.get(key, Piece(*key, 0.0))
        sums = {name: getattr(before, name) + getattr(piece, name) for name in SUMMED}
        merged[key] = max(piece, before, key=lambda piece: piece.us)._replace(layers=group, **sums)
    return merged


def _possessive(piece: Piece) -> str:
    if piece.what not in ("forward", "backward"):
        return piece.name.capitalize()
    first, *along = piece.layers
    listed = " and ".join(filter(None, (", ".join(along[:-1]), *along[-1:])))
    return f"{_plain_layer(first)}'s {piece.what} pass" + (f" with {listed}" if along else "")


def _times(ours: float, theirs: float) -> str:
    return f"{rounded(theirs / ours)} times less" if ours <= theirs else f"{rounded(ours / theirs)} times more"


def us_text(us: float) -> str:
    return f"{us:.3g} us" if us < 1000 else f"{us / 1000:.3g} ms"
