"""The papers' tables and figures, and recipes: `conf/experiment/<name>.yaml` runs the jobs that make one again."""

from cnnexp.papers import castanheira, chavan, garg, khandait, recipes, rendon
from cnnexp.papers.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    **castanheira.EXPERIMENTS,
    **garg.EXPERIMENTS,
    **rendon.EXPERIMENTS,
    **chavan.EXPERIMENTS,
    **khandait.EXPERIMENTS,
    **recipes.EXPERIMENTS,
}
