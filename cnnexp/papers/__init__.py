"""The papers' tables and figures by name; `conf/experiment/<name>.yaml` runs the jobs that make one again."""

from cnnexp.papers import castanheira, chavan, garg, khandait, rendon
from cnnexp.papers.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    **castanheira.EXPERIMENTS,
    **garg.EXPERIMENTS,
    **rendon.EXPERIMENTS,
    **chavan.EXPERIMENTS,
    **khandait.EXPERIMENTS,
}
