"""[dpo]: preference optimisation (Rafailov et al., arXiv:2305.18290), with train.task = "dpo"."""

from typing import Literal, TypeAlias

from pydantic import Field, PositiveFloat

from meshwright.spec.frozen import Frozen

PairLoss: TypeAlias = Literal["sigmoid", "robust", "hinge", "ipo"]


class DpoSection(Frozen):
    """How preferences are learned; the reference is the model that the run starts from. A run keeps all of it."""

    loss: PairLoss = "sigmoid"
    """DPO's own, robust (not biased by wrong labels), SLiC's hinge, or IPO's square of log-ratios per token."""
    beta: PositiveFloat = 0.1
    """How strongly the model is held to the reference: the factor of the log-ratios in equation 7, tau in IPO."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of the pairs that are taken to be labelled the wrong way round (sigmoid: cDPO; robust); 0 is DPO itself."""
