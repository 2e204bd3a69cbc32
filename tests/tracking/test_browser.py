"""MLflow's page: what `cnnexp ui` serves and opens, and what a fresh browser then shows."""

import contextlib
import os
import re
import socket
import sys
import tempfile
import time
from importlib import metadata
from unittest.mock import MagicMock
from urllib.request import urlopen

import pytest
from chromium import CHROMIUM, Browser
from commands import mlflow_warns, raises, serving, wait_for

from cnnexp.errors import BackendUnavailable, ConfigError
from cnnexp.tracking import address, browser, figures, view
from cnnexp.tracking import store as stores
from cnnexp.tracking.events import EXAMPLE, MODEL

pytestmark = mlflow_warns


@pytest.fixture(scope="module")
def store(tmp_path_factory, new_store):
    return stores.Store(new_store(tmp_path_factory.mktemp("ui")), "first")


def test_ui_shows_the_store_to_this_machine_alone_and_a_server_is_its_own_page(store, monkeypatch, capsys):
    commands = []
    monkeypatch.setattr(browser.os, "execve", lambda path, command, environ: commands.append(command))
    browser.command([f"tracking.uri={store._uri}", "port=5123"])
    assert view.address("sqlite", "1", port=5123).partition("#")[0] in capsys.readouterr().out
    stored = ("--backend-store-uri", store._uri, "--default-artifact-root", address.artifact_location(store._uri))
    assert commands[0][3:] == ["ui", *stored, "--host", view.HOST, "--port", "5123", "--workers", "1"]

    missing = f"sqlite:///{address.database_of(store._uri).parent}/none/a.db"
    raises(ConfigError, "none/a.db: no such store", browser.command, [f"tracking.uri={missing}"])
    assert not address.database_of(missing).parent.exists()

    browser.command(["tracking.uri=http://host:5000"])
    assert capsys.readouterr().out.endswith("http://host:5000\n")


@pytest.mark.parametrize("argument", ["prot=1", "port=x", "port"])
def test_ui_refuses_what_it_does_not_know(argument):
    raises(ConfigError, r"legal: tracking\.uri=STORE, port=NUMBER", browser.command, [argument])


def test_without_mlflows_pages_one_line_says_what_installs_them(store, monkeypatch):
    monkeypatch.setattr(metadata, "distributions", lambda **_: [])
    with pytest.raises(BackendUnavailable, match=r"ui: MLflow's pages are not installed; \S*pip install -e '\.\[ui\]'"):
        browser.command([f"tracking.uri={store._uri}"])


def test_free_port_skips_a_taken_one_and_the_last_experiment_is_of_the_newest_run_not_deleted(store, tmp_path):
    with socket.create_server((view.HOST, 0), family=browser.FAMILY) as taken:
        first = taken.getsockname()[1]
        assert browser.free_port(first) > first

    (tmp_path / "other.db").write_bytes(b"not a database " * 100)
    for uri in (f"sqlite:///{tmp_path}/none.db", "http://host", f"sqlite:///{tmp_path}/other.db"):
        assert browser.last_experiment(uri) == (None, False)
    later = stores.Store(store._uri, "later")
    store.begin("first", {}, {})
    time.sleep(0.002)  # MLflow's times are milliseconds
    run_id = later.begin("second", {}, {})
    assert browser.last_experiment(store._uri) == (later._experiment_id, True)
    later._client.delete_run(run_id)
    assert browser.last_experiment(store._uri) == (store._experiment_id, True)


def test_a_page_is_opened_where_there_is_a_screen_once_it_is_served(monkeypatch):
    opened = []
    monkeypatch.setattr(browser.webbrowser, "open", lambda address: opened.append(address) or True)
    with socket.socket(browser.FAMILY) as served:
        served.bind((view.HOST, 0))
        address = view.address("sqlite", "1", port=served.getsockname()[1])
        assert not browser.open_when_served(address, limit_s=0.3)
        assert not browser.answers(address)
        served.listen()
        assert browser.answers(address)
        assert browser.open_when_served(address)
    assert opened == [address]
    monkeypatch.setattr(view.sys, "platform", "linux")
    assert view.has_screen({"DISPLAY": ":0"})
    assert not view.has_screen({"TERM": "xterm"})


def test_a_page_is_served_where_mlflow_opens_no_pane_of_its_assistant(monkeypatch):
    monkeypatch.setattr(view.sys, "platform", "linux")
    assert view.host({"TERM": "xterm"}) == "127.0.0.1"  # tunnels end there
    with contextlib.suppress(OSError):  # where the system has such addresses
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        assert view.host({"DISPLAY": ":0"}) == "::1"
    monkeypatch.setattr(view, "HOST", "::1")
    assert view.address("sqlite", "7").startswith("http://[::1]:5000/#/experiments/7/")
    monkeypatch.setattr(view.socket.socket, "bind", MagicMock(side_effect=OSError))
    assert view.host({"DISPLAY": ":0"}) == "127.0.0.1"


MLFLOW_S = 300.0  # that its server may take to start beside other work
ATTEMPTS_S = (60.0, 120.0, 240.0)  # of a page: on a busy machine one of its parts may not come, and it waits for ever
RUNS = {"cpu": (1.0, 0.9, 2.0), "cpu-simd": (36.5, 0.91, 0.05), "cpu-parallel": (1.75, 0.89, 1.1)}
RANKED = ["cpu-simd", "cpu-parallel", "cpu"]
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed to open MLflow's page in")


@pytest.fixture(scope="module")
def page(tmp_path_factory, new_store):
    """`cnnexp ui` on a sweep of three runs: the address that it opened in the user's browser, and the store."""
    folder = tmp_path_factory.mktemp("page")
    uri = new_store(folder)
    recorded = stores.Store(uri, "backends")
    parent = recorded.begin("sweep", {}, {"kind": "sweep"})
    for backend, (speedup, accuracy, epoch_s) in RUNS.items():
        tags = {"kind": "run", "backend": backend, "model": "one_conv"}
        params = {"model.filters": "8", "trainer.batch_size": "50"}
        run_id = recorded.begin(f"{backend} one_conv digits", params, tags, parent=parent)
        times = {"time/median_epoch_s": epoch_s, "throughput/median_images_per_s": 300 / epoch_s}
        found = {"speedup/median": speedup, "final/test_accuracy": accuracy, **times}
        by_epoch = (({"test/accuracy": accuracy, "train/loss": 1 / epoch}, epoch, epoch) for epoch in (1, 2))
        for metrics in (*by_epoch, (found, 0, 3)):
            recorded._client.log_batch(run_id, stores._metrics(*metrics))
        (folder / backend / MODEL).mkdir(parents=True)
        (folder / backend / MODEL / EXAMPLE).write_text("[[[[0]]]]")
        (folder / backend / "a.ckpt").write_bytes(b"a model")
        model = {"checkpoint": "a.ckpt", "shape": (1, 1, 1), "pixels": "uint8", "classes": 10, "step": 2}
        recorded._save_model(run_id, folder / backend, model)
        figure = folder / backend / view.CURVES
        figures.save(figures.curves([{"epoch": 1, "test/loss": 1.0, "test/accuracy": accuracy}]), figure)
        note = view.illustrated({view.NOTE: "fast"}, run_id, folder / backend)
        recorded.finish(run_id, "FINISHED", note, [str(figure.parent)])
    recorded.finish(parent, "FINISHED", {})
    opened = folder / "opened"
    opener = folder / "opener"
    opener.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    opener.chmod(0o755)
    command = [sys.executable, "-m", "cnnexp", "ui", f"tracking.uri={uri}", f"port={browser.free_port(5300)}"]
    with serving(*command, env={**os.environ, "BROWSER": f"{opener} %s"}) as process:
        process.stdout.readline()
        printed = process.stdout.readline().strip()
        wait_for(opened.exists, limit_s=MLFLOW_S)
        assert opened.read_text().strip() == printed
        yield printed, recorded


def see(address, shown):
    """Have a fresh browser draw a page until `shown(page)` asserts nothing false; another where that takes too long."""
    for attempt_s in ATTEMPTS_S:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Browser(profile) as page:
            # the window is as high as all of the charts: MLflow draws those alone that are in sight
            page.call("Emulation.setDeviceMetricsOverride", width=1600, height=2600, deviceScaleFactor=1, mobile=False)
            page.call("Page.navigate", url=address)
            ends = time.monotonic() + attempt_s
            while time.monotonic() < ends:
                try:
                    return shown(page.evaluate("document.documentElement?.outerHTML ?? ''"))
                except AssertionError as error:
                    last = error
                time.sleep(0.2)
            last.add_note(f"the page reads: {page.evaluate('document.body?.innerText')}; {page.said}")
    raise last


def names(dom):
    """Return the runs that a list shows, in its order."""
    return list(dict.fromkeys(re.findall(r">(cpu[a-z-]*) one_conv digits<", dom)))


@needs_chromium
@pytest.mark.thorough
def test_the_page_opens_on_the_ranking_with_our_columns_charts_and_models(page):
    address, store = page

    def listed(dom):
        assert names(dom) == RANKED
        assert set(re.findall(r'col-id="((?:tags|params|metrics)\.[^"]*)"', dom)) == view.COLUMNS.keys()
        assert "MLflow Assistant" not in dom

    def charts(dom):
        assert names(dom)[:3] == RANKED
        assert view.SECTION in dom
        bars = re.findall(r'class="bartext[^>]*data-unformatted="([^"]*)"', dom)
        assert dom.count("bartext") >= 12
        for speedup, accuracy, epoch_s in RUNS.values():
            assert {f"{speedup:.2f}", f"{accuracy:.2f}", f"{epoch_s:.2f}"} <= set(bars)
        assert dom.count("scatterlayer") >= 2  # accuracy and loss by epoch
        assert "workflowType=genai" not in dom

    def models(dom):
        assert set(names(dom)) == set(RUNS)

    site, run_id = address.partition("#")[0], store._search("tags.backend = 'cpu'", 1)[0].info.run_id
    picture = f"get-artifact?path={view.CURVES}&run_uuid={run_id}"

    def curves(dom):
        assert f'src="{picture.replace("&", "&amp;")}"' in dom

    see(f"{site}#/experiments/{store._experiment_id}/runs/{run_id}?{view.MODE}", curves)
    assert urlopen(site + picture).read(4) == b"\x89PNG"
    see(address, listed)
    see(address.replace("=TABLE", "=CHART"), charts)
    see(f"{site}#/experiments/{store._experiment_id}/models?{view.MODE}", models)


@needs_chromium
@pytest.mark.thorough
def test_without_our_view_the_plain_list_opens(page):
    address, store = page
    store._client.set_experiment_tag(store._experiment_id, view.TAG, "no view")
    try:
        experiment = browser.last_experiment(store._uri)
        plain = address.partition("#")[0] + "#" + view.address(store._uri, *experiment).partition("#")[2]

        def shown(dom):
            assert ">sweep<" in dom

        see(plain, shown)
    finally:
        store._client.set_experiment_tag(store._experiment_id, view.TAG, view.state())
    assert experiment == (store._experiment_id, False)
