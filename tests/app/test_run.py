import re

from commands import TINY

from cnnexp.tracking.events import read_journal

FEW = (*TINY, "trainer.baseline=numpy")


def told(out):
    """Return the rows of a verdict by their titles."""
    rows = re.findall(r"^([a-z ]+?) {2,}(\S.*(?:\n {2,}\S.*)*)", out, re.MULTILINE)
    return {title: " ".join(text.split()) for title, text in rows}


def test_a_run_says_what_ended_it_that_test_images_chose_and_where_nothing_is_left_to_train(run, tmp_path):
    words = (*FEW, "trainer.epochs=5", "trainer.target=0.001")
    found = told(run(*words)[1])
    assert found["stopped"] == "after epoch 1: trainer.target=0.001 was reached on the test images"
    assert "the test images choose when training ends" in found["chosen by"]
    assert "speed" in found
    found = told(run(*words, "trainer.resume=auto")[1])
    assert found["resumed"] == f"after epoch 1, from {tmp_path}/run; nothing was left to train"
    assert not {"speed", "speedup", "sharing alone", "machine"} & found.keys()
    assert len(read_journal(tmp_path / "run")["epochs"]) == 1
    found = told(run(*words, "dataset.validation_size=20", f"hydra.run.dir={tmp_path}/validated")[1])
    assert found["stopped"] == "after epoch 1: trainer.target=0.001 was reached on the validation images"
    assert "chosen by" not in found, "a validation split that chose leaves the test images honest"


def test_a_resumed_run_says_from_where_and_one_cut_short_by_what(run, tmp_path):
    assert not {"stopped", "chosen by", "resumed", "cut short"} & told(run(*FEW)[1]).keys()
    found = told(run(*FEW, "trainer.epochs=2", f"trainer.resume={tmp_path}/run", f"hydra.run.dir={tmp_path}/more")[1])
    assert found["resumed"] == f"after epoch 1, from {tmp_path}/run"
    assert "speed" in found
    cut = told(run(*FEW, "trainer.pass_s=1e-9", f"hydra.run.dir={tmp_path}/cut")[1])["cut short"]
    assert re.match(r"trainer.pass_s=1e-09 ended epochs early: from 50 of 200 images on", cut)
