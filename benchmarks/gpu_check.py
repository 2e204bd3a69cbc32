"""On a machine with an NVIDIA GPU: are the GPU backends right, and how fast are they beside PyTorch?

    python -m benchmarks.gpu_check [--cases NAME...] [--backends NAME...] [--minutes M] [--quick] [--dry-run]
                                   [--skip-conformance] [--peers [NAME...]] [--out FILE]

Needs numpy, numba, numba-cuda and, for the comparison, torch. First every GPU backend is verified against the float64
oracle of `tests/`, then the ceilings of the machine are measured (copy bandwidth, multiply-add rate, what a launch and
a graph's node cost), then the contestants train the same networks by turns, on data that is on the device for all:

    every GPU backend; PyTorch eager, channels_last, torch.compile(mode="reduce-overhead"), and a step captured in a
    CUDA graph; each in full float32, the last two also with TF32, as rows of their own that count for no ratio.

Every raw number goes into one JSON file, which is written anew after every part, a table to standard output. Parts run
in processes of their own, and whatever fails is reported and costs no other part its numbers. What the file holds from
an earlier run on the same GPU stays there and is not done again, so that the whole can be had in pieces: `--minutes 9`
begins no part after nine minutes, and says what is left. `--dry-run` goes the whole way with a tiny network: to see
that the script works before it is given an hour, or on the software GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numba import cuda

from benchmarks.cases import CASES as CPU_CASES
from benchmarks.cases import LOSS, Case, multiply_adds
from cnnexp.backends import backend_class
from cnnexp.backends.gpu.limits import FLOATS, TURNS, best_seconds, copied_bytes_per_s, multiply_adds_per_s
from cnnexp.errors import CnnexpError
from cnnexp.network import BatchNorm2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, Network, ReLU, Residual
from cnnexp.network.models import OneConv, TwoConvMlp, TwoConvPool4
from cnnexp.optimizers import SGD, Adam
from cnnexp.testing import LOSSES, NETWORKS

ROOT = Path(__file__).parents[1]
BACKENDS = ("gpu-naive", "gpu-shared-input", "gpu-shared", "gpu-tuned", "gpu-fused")
TORCH = ("eager", "channels_last", "compile", "graph", "compile tf32", "graph tf32")
EPOCH = 60_000  # images
MNIST = (28, 28, 1)
REPEATS = 7
PASS_S = 0.5  # about how long one timed pass takes

CASES = (
    Case("one_conv-f64-b1000", "gpu", "one_conv, 64 filters", OneConv(64).network(MNIST, 10), 1000, SGD(lr=0.01)),
    Case("one_conv-f256-b500", "gpu", "one_conv, 256 filters", OneConv(256).network(MNIST, 10), 500, SGD(lr=0.01)),
    Case("one_conv-f256-b1000", "gpu", "one_conv, 256 filters", OneConv(256).network(MNIST, 10), 1000, SGD(lr=0.01)),
    Case("one_conv-f32-b100", "gpu", "one_conv, 32 filters", OneConv(32).network(MNIST, 10), 100, SGD(lr=0.01)),
    Case("two_conv_mlp-b64", "gpu", "two_conv_mlp", TwoConvMlp().network(MNIST, 10), 64, Adam(lr=1e-3)),
    Case("two_conv_pool4-b32", "gpu", "two_conv_pool4", TwoConvPool4().network(MNIST, 10), 32, Adam(lr=1e-3)),
)

PUBLISHED = ("keras_mnist", "keras_cifar", "vgg_norm", "resnet20", "mobilenet", "gelu_mlp")
CASES += tuple(case for case in CPU_CASES if case.name in {f"{name}-b128" for name in PUBLISHED})

TINY = Network((8, 8, 1), (Conv2d(4, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(10)))
DRY_RUN = (Case("tiny-b4", "gpu", "tiny", TINY, 4, SGD(lr=0.01)),)
DRY_EPOCH = 8

# Every layer and setting, with more than one block and tiles that do not fill: (network, images, whole numbers). Large
# networks get whole numbers: among so many decisions, of ReLUs and maxima, rounding would blur one in any other draw.
CONFORMANCE = {
    "one_conv": (Network(MNIST, (Conv2d(33, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(10))), 37, True),
    "two_conv_mlp": (TwoConvMlp().network(MNIST, 10), 9, True),
    "two_conv_pool4": (TwoConvPool4().network(MNIST, 10), 33, True),
    "many_filters": (Network((5, 5, 3), (Conv2d(300, 3), ReLU(), MaxPool2d(3), Flatten(), Linear(11))), 5, True),
    "many_channels": (
        Network(
            (5, 5, 3),
            (
                *(Conv2d(16, 3, padding="same"), BatchNorm2d(), ReLU()),
                *(Residual((Conv2d(16, 3, padding="same"), ReLU(), Conv2d(16, 1))), ReLU()),
                *(Conv2d(40, 3, 2, "auto"), ReLU(), Conv2d(18, 1, bias=False), Dropout(0.3), Flatten(), Linear(3)),
            ),
        ),
        3,
        False,
    ),
    "many_outputs": (Network((4, 4, 1), (Conv2d(3, 3), ReLU(), Flatten(), Linear(40), ReLU(), Linear(99))), 4, False),
    **{title: (Network(*shape_and_layers), 5, False) for title, shape_and_layers in NETWORKS.items()},
}


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `work` returns, from a process of its own: a fault on the device spoils its process for good."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def failure(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def conform(name: str, titles: tuple[str, ...]) -> dict[str, str]:
    """Return, by network, "ok" or what is wrong; the first draw with clear decisions is taken."""
    sys.path.insert(0, str(ROOT / "tests"))
    from conformance import check_case, check_training, decisions_are_clear, make_case

    found: dict[str, str] = {}
    for title in titles:
        network, images, exact = CONFORMANCE[title]
        loss = LOSSES.get(title, LOSS)
        draws = (make_case(network, loss, images, seed, exact=exact) for seed in range(1000))
        case = next(draw for draw in draws if decisions_are_clear(draw))
        try:
            check_case(backend_class(name)(), case)
            check_training(backend_class(name)(), case, Adam(lr=0.01))
            found[title] = "ok"
        except Exception as error:  # of any kind: a compiler's, a driver's, a wrong number
            found[title] = failure(error)
        print(f"{name:18} {title:16} {found[title]}", flush=True)
    if name == "gpu-fused":
        try:
            found["graphs and single launches"] = _graphs_change_nothing()
        except Exception as error:
            found["graphs and single launches"] = failure(error)
    return found


def _graphs_change_nothing() -> str:
    """Return "ok" where the captured and the plainly launched kernels leave the same bits."""
    for network in (TINY, CONFORMANCE["max-pool"][0]):
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (520, *network.input_shape), np.uint8)
        labels = rng.integers(0, network.output_shape[0], 520)
        states = []
        for graphs in (False, True):
            program = backend_class("gpu-fused")(graphs=graphs).compile(network, LOSS, Adam(), 7)
            program.restore({"parameters": network.initial_parameters(0)})
            program.train(program.load(images, labels), np.arange(520), 0.01)  # graphs of 64, 8 and 1 steps, and a rest
            states.append(program.state()["parameters"])
        if not np.array_equal(*states):
            return f"the parameters differ, {network.layers}"
    return "ok"


@dataclass
class Contestant:
    """Something that trains: `run(steps)` returns when the device is done; `seconds` has one list per timed pass."""

    name: str
    run: Callable[[int], None] | None
    compile_s: float
    steps: int = 1
    seconds: list[float] = field(default_factory=list)

    def settle(self, most: int) -> None:
        """Warm up, and find how many steps take about `PASS_S`."""
        self.run(2)
        while True:
            elapsed = _seconds(lambda: self.run(self.steps))
            if elapsed > PASS_S / 4 or self.steps >= most:
                break
            self.steps = min(most, self.steps * 4)
        self.steps = max(1, min(most, round(self.steps * PASS_S / elapsed)))
        self.run(self.steps)  # whatever a pass of this length captures or compiles

    def images_per_s(self, batch_size: int) -> float:
        return self.steps * batch_size / statistics.median(self.seconds)


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def ours(name: str, case: Case, images: np.ndarray, labels: np.ndarray) -> Contestant:
    """Return one of our backends, its data on the device."""
    program = backend_class(name)().compile(case.network, LOSS, case.optimizer, case.batch_size)
    program.restore({"parameters": case.network.initial_parameters(0)})
    handle = program.load(images, labels)
    order = np.random.default_rng(1).permutation(len(images))

    def run(steps: int) -> None:
        program.train(handle, order[: steps * case.batch_size], case.optimizer.lr)

    return Contestant(name, run, program.compile_s)


def peer(name: str, case: Case, images: np.ndarray, labels: np.ndarray, device: str = "cuda") -> Contestant:
    """Return PyTorch, its images on the device as float32, gathered there by a permutation."""
    import torch

    from benchmarks.torch_peer import modules

    how, tf32 = name.split()[0], name.endswith("tf32")
    layout = torch.channels_last if how == "channels_last" else torch.contiguous_format
    started = time.perf_counter()
    torch.manual_seed(0)
    layers = modules(case.network.stages, channels_last=how == "channels_last")
    model = torch.nn.Sequential(*layers).to(device, memory_format=layout)
    x = torch.from_numpy(images).to(device).float().div(255).permute(0, 3, 1, 2).contiguous(memory_format=layout)
    t = torch.from_numpy(labels).to(device).long()
    order = torch.from_numpy(np.random.default_rng(1).permutation(len(images))).to(device)
    batch = case.batch_size
    fast = {"capturable": True, "fused": True} if isinstance(case.optimizer, Adam) else {"fused": True}
    kind = torch.optim.Adam if isinstance(case.optimizer, Adam) else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=case.optimizer.lr, **(fast if device == "cuda" else {}))
    forward = torch.compile(model, mode="reduce-overhead") if how == "compile" else model

    def step(indices: Any) -> None:
        optimizer.zero_grad(set_to_none=how != "graph")
        torch.nn.functional.cross_entropy(forward(x[indices]), t[indices]).backward()
        optimizer.step()

    def precision() -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = True

    precision()
    one = _captured(step, order[:batch].clone()) if how == "graph" else step

    def run(steps: int) -> None:
        precision()
        for i in range(steps):
            if how == "compile":
                torch.compiler.cudagraph_mark_step_begin()
            one(order[i * batch : (i + 1) * batch])
        if device == "cuda":
            torch.cuda.synchronize()

    run(3)
    return Contestant(f"torch {name}", run, time.perf_counter() - started)


def _captured(step: Callable[[Any], None], indices: Any) -> Callable[[Any], None]:
    """Capture a step in a CUDA graph; return what copies a batch's indices in and replays it."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(indices)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(indices)

    def replay(batch: Any, reads: Any = step) -> None:  # a graph keeps addresses, `step` what lies there
        indices.copy_(batch)
        graph.replay()

    return replay


def least_bytes(case: Case) -> float:
    """Return the fewest bytes of device memory that a step must move per image.

    Its pixels as bytes, forward and backward; every pooled value and its code (a gradient goes through it alone)
    written and read once; parameters and optimizer state read and written once a step, the gradient too.
    """
    pixels = 2 * math.prod(case.network.input_shape)
    pooled = sum(math.prod(s.output_shape) for s in case.network.stages if isinstance(s.layer, MaxPool2d))
    state = 2 + 2 * len(case.optimizer.slots) + 2
    return pixels + 2 * 5 * pooled + 4 * state * case.network.parameter_count / case.batch_size


def floor_s(case: Case, ceilings: dict[str, float]) -> float | None:
    """Return the seconds per image below which this machine cannot train: arithmetic or memory, whichever is more.

    None where one of the two was not measured.
    """
    through, _ = multiply_adds(case.network)
    if not {"fma_per_s", "copy_bytes_per_s"} <= set(ceilings):
        return None
    return max(through / ceilings["fma_per_s"], least_bytes(case) / ceilings["copy_bytes_per_s"])


@dataclass(frozen=True)
class Effort:
    """How much work each measurement of a ceiling is: floats copied, turns of the multiply-add loop, launches."""

    floats: int = FLOATS
    turns: int = TURNS
    launches: int = 1000


def measure_ceilings(effort: Effort) -> tuple[dict[str, float], dict[str, str]]:
    """Measure what the machine can do; return it by name, and what could not be measured.

    Copy bandwidth (bytes read and written), multiply-adds, launches by number of arrays, and graph nodes.
    """
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    for probe in (_copy, _multiply_adds, _launches, _graph_nodes):
        try:
            found.update(probe(effort))
        except Exception as error:
            failed[f"ceilings, {probe.__name__[1:]}"] = failure(error)
    return found, failed


def _copy(effort: Effort) -> Iterator[tuple[str, float]]:
    yield "copy_bytes_per_s", copied_bytes_per_s(effort.floats)


def _multiply_adds(effort: Effort) -> Iterator[tuple[str, float]]:
    yield "fma_per_s", multiply_adds_per_s(backend_class("gpu-naive")().gpu, effort.turns)


def _launches(effort: Effort) -> Iterator[tuple[str, float]]:
    for count in range(5):
        kernel, given = _idle_kernel(count), [cuda.device_array(32, np.float32) for _ in range(count)]
        seconds = best_seconds(partial(_launch_often, kernel[1, 32], given, effort.launches))
        yield f"launch_us_{count}_arrays", seconds / effort.launches * 1e6


def _launch_often(launch: Callable[..., None], arguments: list[Any], times: int) -> None:
    for _ in range(times):
        launch(*arguments)


def _graph_nodes(effort: Effort) -> Iterator[tuple[str, float]]:
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    stream, builder = device.create_stream(), device.create_graph_builder()
    idle, array = _idle_kernel(1), cuda.device_array(32, np.float32)
    idle[1, 32](array)  # compiled before it is captured
    cuda.synchronize()
    builder.begin_building()
    for _ in range(effort.launches):
        idle[1, 32, builder](array)
    graph = builder.end_building().complete()
    seconds = best_seconds(lambda: (graph.launch(stream), stream.sync()))
    yield "graph_node_us", seconds / effort.launches * 1e6


def _idle_kernel(arrays: int) -> Any:
    """Return a kernel of `arrays` arrays that adds one to an element, or does nothing."""
    if arrays == 0:
        return cuda.jit("void()")(lambda: None)
    names = ", ".join(f"a{k}" for k in range(arrays))
    source = f"def idle({names}):\n    a0[cuda.threadIdx.x] += one\n"
    scope: dict[str, Any] = {"cuda": cuda, "one": np.float32(1)}
    exec(source, scope)
    return cuda.jit(f"void({', '.join(['float32[::1]'] * arrays)})")(scope["idle"])


Failures = dict[str, str]  # one line, by contestant


def race(
    case: Case, names: tuple[str, ...], peers: tuple[str, ...], repeats: int, epoch: int
) -> tuple[list[Contestant] | None, Failures]:
    """Let all train by turns; return them with their raw seconds, and what failed.

    None for the contestants where a failure has spoiled the device for all that come after it in this process.
    """
    rng = np.random.default_rng(0)
    shape = (epoch, *case.network.input_shape)
    images, labels = rng.integers(0, 256, shape, np.uint8), rng.integers(0, 10, epoch)
    contestants: list[Contestant] = []
    failed: Failures = {}

    def attempt(title: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # whatever one contestant lacks, the others race on; it is reported
            failed[title] = failure(error)
            print(f"{case.name}: {title} does not run: {failed[title]}", flush=True)

    makers = [(name, ours, name) for name in names] + [(f"torch {name}", peer, name) for name in peers]
    for title, make, name in makers:
        contestant = attempt(title, lambda make=make, name=name: make(name, case, images, labels))
        if contestant is not None:
            attempt(title, lambda one=contestant: one.settle(epoch // case.batch_size))
        if title not in failed:
            contestants.append(contestant)
        elif not _device_works():
            return None, failed
    for _ in range(repeats):
        for contestant in list(contestants):
            seconds = attempt(contestant.name, lambda one=contestant: _seconds(lambda: one.run(one.steps)))
            if seconds is not None:
                contestant.seconds.append(seconds)
            elif not _device_works():
                return None, failed
            else:
                contestants.remove(contestant)
    return [replace(contestant, run=None) for contestant in contestants], failed  # what runs stays in its process


def _device_works() -> bool:
    try:
        cuda.synchronize()
    except Exception:
        return False
    return True


def race_apart(
    case: Case, names: tuple[str, ...], peers: tuple[str, ...], repeats: int, epoch: int
) -> tuple[list[Contestant], Failures]:
    """`race` in a process of its own; in another, without who failed, where a failure has spoiled the device."""
    failed: Failures = {}
    while True:
        left = tuple(name for name in names if name not in failed)
        rest = tuple(name for name in peers if f"torch {name}" not in failed)
        try:
            contestants, more = apart(race, case, left, rest, repeats, epoch)
        except Exception as error:
            return [], {**failed, "the process": failure(error)}
        failed.update(more)
        if contestants is not None:
            return contestants, failed


def rows(case: Case, contestants: list[Contestant], floor: float | None) -> list[dict[str, Any]]:
    """Return what the table shows: images/s, ms per epoch, times the best PyTorch in float32, share of the floor."""
    speeds = {c.name: c.images_per_s(case.batch_size) for c in contestants}
    best = max((s for name, s in speeds.items() if name.startswith("torch") and "tf32" not in name), default=None)
    return [
        {
            "case": case.name,
            "contestant": name,
            "images_per_s": speed,
            "epoch_ms": EPOCH / speed * 1e3,
            "times_best_torch": None if best is None else speed / best,
            "fraction_of_floor": None if floor is None else speed * floor,
        }
        for name, speed in speeds.items()
    ]


def print_table(table: list[dict[str, Any]]) -> None:
    print(f"\n{'case':22} {'contestant':22} {'images/s':>14} {'ms/epoch':>10} {'x best torch':>12} {'of floor':>9}")
    for row in table:
        ratio, share = row["times_best_torch"], row["fraction_of_floor"]
        print(
            f"{row['case']:22} {row['contestant']:22} {row['images_per_s']:14,.0f} {row['epoch_ms']:10.2f} "
            f"{'-' if ratio is None else f'{ratio:.2f}':>12} {'-' if share is None else f'{share:.1%}':>9}"
        )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("numpy", "numba", "numba-cuda", "cuda-core", "torch", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", metavar="NAME", choices=[case.name for case in CASES], help="race these alone"
    )
    parser.add_argument("--backends", nargs="+", metavar="NAME", choices=BACKENDS, help="of ours, these alone")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no part after so many")
    parser.add_argument("--quick", action="store_true", help="3 repeats, and only the fastest of ours")
    parser.add_argument("--dry-run", action="store_true", help="a tiny network all the way; its times mean nothing")
    parser.add_argument("--skip-conformance", action="store_true", help="time at once")
    parser.add_argument("--peers", nargs="*", default=TORCH, choices=TORCH, help="of PyTorch's ways, these alone")
    parser.add_argument("--out", type=Path, help="the JSON file; benchmarks/results/gpu-<name of the GPU>.json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        gpu, dry = backend_class("gpu-naive")().gpu, options.dry_run
    except CnnexpError as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return error.exit_code
    names = tuple(options.backends or (("gpu-fused",) if options.quick else BACKENDS))
    peers = tuple(options.peers)
    if peers and find_spec("torch") is None:
        print("torch is not installed: ours are timed alone", flush=True)
        peers = ()
    file = ROOT / ("outputs/gpu-dry-run" if dry else f"benchmarks/results/gpu-{gpu.name.lower().replace(' ', '-')}")
    out = options.out or file.with_suffix(".json")
    empty = {key: {} for key in ("conformance", "ceilings", "raw", "failed")}
    report: dict[str, Any] = {
        "dry_run": dry,
        "gpu": asdict(gpu),
        "versions": versions(),
        "runs": [],
        **empty,
        "table": [],
    }
    if out.exists():
        earlier = json.loads(out.read_text())
        apart_in = [
            key for key in ("dry_run", "gpu", "versions") if json.loads(json.dumps(report[key])) != earlier[key]
        ]
        if apart_in:
            print(f"gpu_check: error: {out} is of another {', '.join(apart_in)}; add --out=FILE", file=sys.stderr)
            return 2
        report = earlier
    report["runs"].append({"started": time.strftime("%FT%TZ", time.gmtime()), "arguments": sys.argv[1:]})
    cases = [case for case in (DRY_RUN if dry else CASES) if not options.cases or case.name in options.cases]
    conforming = () if options.skip_conformance else names
    repeats, epoch = (2 if dry else 3 if options.quick else REPEATS), DRY_EPOCH if dry else EPOCH
    save(report, out)
    started, left = time.monotonic(), []
    for title, part in _parts(report, cases, conforming, names, peers, dry, repeats, epoch):
        if time.monotonic() - started > 60 * options.minutes:
            left.append(title)
            continue
        part()
        save(report, out)
    return _summarize(report, left, out)


def _summarize(report: dict[str, Any], left: list[str], out: Path) -> int:
    """Print what was found, and return the exit code."""
    print(json.dumps(report["ceilings"], indent=1), flush=True)
    print_table(report["table"])
    wrong = [
        f"{name}: {title}: {what}"
        for group in (report["conformance"], report["failed"])
        for name, found in group.items()
        for title, what in found.items()
        if what != "ok"
    ]
    for line in wrong:
        print(f"NOT OK  {line}")
    if left:
        print(f"left for another run of the same command: {', '.join(left)}")
    print(f"\nraw numbers: {out}")
    return 1 if any(": torch " not in line for line in wrong) else 0


def _parts(
    report: dict[str, Any],
    cases: list[Case],
    conforming: tuple[str, ...],
    names: tuple[str, ...],
    peers: tuple[str, ...],
    dry: bool,
    repeats: int,
    epoch: int,
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield what the report lacks: a title, and what adds it to the report."""
    titles = ("linear",) if dry else tuple(CONFORMANCE)
    for name in conforming:
        if set(report["conformance"].get(name, {"nothing": ""}).values()) != {"ok"}:
            yield f"conformance of {name}", partial(_conform, report, name, titles)
    if not report["ceilings"]:
        yield "ceilings", partial(_ceilings, report, Effort(floats=1024, turns=1, launches=2) if dry else Effort())
    for case in cases:
        raced = report["raw"].get(case.name, {})
        if any(name not in raced for name in (*names, *(f"torch {name}" for name in peers))):
            yield case.name, partial(_race, report, case, names, peers, repeats, epoch)


def _conform(report: dict[str, Any], name: str, titles: tuple[str, ...]) -> None:
    try:
        report["conformance"][name] = apart(conform, name, titles)
    except Exception as error:
        report["conformance"][name] = {"the process": failure(error)}


def _ceilings(report: dict[str, Any], effort: Effort) -> None:
    try:
        report["ceilings"], report["failed"]["ceilings"] = apart(measure_ceilings, effort)
    except Exception as error:
        report["failed"]["ceilings"] = {"the process": failure(error)}


def _race(
    report: dict[str, Any], case: Case, names: tuple[str, ...], peers: tuple[str, ...], repeats: int, epoch: int
) -> None:
    """Race all of a case's contestants again: a ratio is of times taken by turns."""
    raced = report["raw"].get(case.name, {})
    names = tuple(name for name in BACKENDS if name in names or name in raced)
    peers = tuple(name for name in TORCH if name in peers or f"torch {name}" in raced)
    contestants, report["failed"][case.name] = race_apart(case, names, peers, repeats, epoch)
    report["raw"][case.name] = {
        c.name: {"steps": c.steps, "batch_size": case.batch_size, "seconds": c.seconds, "compile_s": c.compile_s}
        for c in contestants
    }
    others = [row for row in report["table"] if row["case"] != case.name]
    report["table"] = others + rows(case, contestants, floor_s(case, report["ceilings"]))


def save(report: dict[str, Any], path: Path) -> None:
    """Write the report, in the place of what was written of it before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f"{path.name}.part")
    text = re.sub(r"\[[^][{}]*\]|\{[^][{}]*\}", lambda flat: " ".join(flat[0].split()), json.dumps(report, indent=1))
    whole.write_text(text + "\n")
    whole.replace(path)


if __name__ == "__main__":
    sys.exit(main())
