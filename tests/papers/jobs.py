"""Jobs of a sweep, as their journals would tell them."""

from cnnexp.papers.measures import Job


def make_job(backend="numpy", images=100, timed=100, seconds=2.0, status="FINISHED", accuracy=0.5, **config) -> Job:
    config = {"backend.name": backend, "trainer.batch_size": 10, **config}
    epoch = {"epoch": 1, "time/epoch_s": seconds, "train/images": timed, "test/loss": 0.1}
    finished = status == "FINISHED"
    metrics = {"final/test_accuracy": accuracy} if finished else {}
    return Job(config, status, None if finished else "no GPU", metrics, [epoch] if finished else [], images)
