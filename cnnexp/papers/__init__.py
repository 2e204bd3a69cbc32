"""The papers' tables and figures, and recipes: `conf/experiment/<name>.yaml` runs the jobs that make one again."""

from cnnexp.papers import castanheira, chavan, garg, khandait, recipes, rendon
from cnnexp.papers.experiment import Experiment

_PAPERS = castanheira, garg, rendon, chavan, khandait, recipes
EXPERIMENTS: dict[str, Experiment] = {key: found for paper in _PAPERS for key, found in paper.EXPERIMENTS.items()}
