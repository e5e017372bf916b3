"""How to recycle, and from which checkpoints: the names and numbers a user chooses."""

from dataclasses import dataclass

from jetmoe_jax.checkpoints.load import Checkpoint
from jetmoe_jax.errors import UserError, known_key
from jetmoe_jax.models.registry import Model
from jetmoe_jax.recycling import dense, graph
from jetmoe_jax.recycling.statistics import CO_ACTIVATION, METRICS, Need

# Experts out of channels and neurons of a (wider) predecessor, and out of a whole dense MLP.
SELECTIONS = ('random', 'uniform', 'importance', 'graph')
UPCYCLINGS = (
    'sparse_upcycling',
    'drop_upcycling',
    'noise_upcycling',
    'branch_train_mix',
    'from_scratch',
)
STRATEGIES = SELECTIONS + UPCYCLINGS


@dataclass(frozen=True)
class Recipe:
    """Everything a recycling depends on but the checkpoints and the statistics.

    Attributes:
      strategy: of the experts, one of STRATEGIES.
      metric: of the statistics that 'importance' draws by: 'L2', 'L1' or 'active'.
      non_experts: how the predecessor is reduced where there is no same-size checkpoint;
        'importance' there goes by the same metric.
      ratio: share of an expert's neurons that 'drop_upcycling' draws again.
      communities: how 'graph' splits its graph, 'louvain' or 'metis'.
      seed: of the draws and of what is made fresh (router and head).

    Raises:
      UserError: a name is unknown (the nearest is named), ratio is outside [0, 1], seed below 0,
        or METIS is not installed.
    """

    strategy: str = 'importance'
    metric: str = 'L2'
    non_experts: str = 'weight_selection'
    ratio: float = 0.5
    communities: str = 'louvain'
    seed: int = 0

    def __post_init__(self):
        known_key('recycling strategy', self.strategy, STRATEGIES)
        known_key('metric', self.metric, METRICS)
        known_key('non_experts strategy', self.non_experts, dense.STRATEGIES)
        known_key('communities method', self.communities, graph.METHODS)
        if not 0 <= self.ratio <= 1:
            raise UserError(f'ratio is {self.ratio}; give a share from 0 to 1.')
        if self.seed < 0:
            raise UserError(f'seed is {self.seed}; give a whole number from 0.')
        if self.strategy == 'graph':
            graph.check_method(self.communities)

    @property
    def selects(self) -> bool:
        """Experts are selected from the predecessor, rather than copied from a dense MLP."""
        return self.strategy in SELECTIONS


@dataclass(frozen=True)
class Donors:
    """The dense checkpoints that a successor is made of.

    Attributes:
      predecessor: what experts are selected from, block by block of the same path.
      same_size: a model of the successor's width; gives all that is no expert, and the MLPs that
        are upcycled. Without it the predecessor does, reduced.
      branches: the further checkpoints of 'branch_train_mix'.
    """

    predecessor: Checkpoint
    same_size: Checkpoint | None = None
    branches: tuple[Checkpoint, ...] = ()

    @property
    def dense(self) -> Checkpoint:
        """What gives all that is no expert."""
        return self.same_size or self.predecessor

    @property
    def reduced(self) -> bool:
        """`dense` is reduced to the successor's size."""
        return self.same_size is None


def needed_statistics(successor: Model, donors: Donors, recipe: Recipe) -> list[Need]:
    """The (block, position, metric) that a recycling reads of the predecessor's statistics."""
    needs = []
    metric = {'importance': recipe.metric, 'graph': CO_ACTIVATION}.get(recipe.strategy)
    if metric:
        positions = ('mlp_input', 'mlp_act')
        needs += [(block, at, metric) for block in successor.moe_paths for at in positions]
    if donors.reduced and recipe.non_experts == 'importance':
        needs += [(block, 'mlp_input', recipe.metric) for block in donors.predecessor.model.blocks]
        positions = ('attn_proj_input', 'mlp_act')
        needs += [(block, at, recipe.metric) for block in successor.blocks for at in positions]
    return list(dict.fromkeys(needs))
