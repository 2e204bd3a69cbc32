from pathlib import Path

from commands import raises
from results import write_journal

from cnnexp.app import report
from cnnexp.errors import ConfigError, DataError
from cnnexp.papers.compare import note_facts
from cnnexp.tracking.events import LACKING


def test_a_report_is_made_again_from_its_folder_and_of_nothing_there_is_none(tmp_path, capsys):
    config = {"backend": {"name": "cpu"}, "model": {"hidden": [4]}}
    job = {"event": "job", "name": "n", "overrides": [], "config": config, "config_hash": "h", "contended": False}
    finish = {"event": "finish", "status": LACKING, "tags": {"error": "no <b>"}, "metrics": {}}
    write_journal(tmp_path / "0", job, finish)
    note_facts(tmp_path, "khandait_quadrants", ["experiment=khandait_quadrants"])
    report.command([str(tmp_path)])
    made = Path(capsys.readouterr().out.strip())
    assert made == tmp_path / "report" / "index.html"
    assert "not on this machine" in made.read_text(encoding="utf-8")
    assert "no &lt;b&gt;" in made.read_text(encoding="utf-8")

    raises(ConfigError, "give a sweep's folder, or an experiment: castanheira_fig2_batch", report.command, [])
    raises(ConfigError, r"neither a folder nor .*; did you mean 'garg_table1'", report.newest, "garg_tabel1", tmp_path)
    raises(ConfigError, r"never run; run it with .* experiment=garg_table1", report.newest, "garg_table1", tmp_path)
    raises(DataError, "not the folder of a sweep", report.command, [str(tmp_path / "0")])
