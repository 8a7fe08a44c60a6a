"""A physics-informed network: the loss is of a Laplacian, whose backward differentiates twice."""

from __future__ import annotations

import torch
from pina import Condition, Trainer
from pina.domain import CartesianDomain
from pina.equation.zoo import FixedValue, PoissonEquation
from pina.model import FeedForward
from pina.problem import SpatialProblem
from pina.solver import PhysicsInformedSingleModelSolver

from tests.field.support import on_two_ranks, trainer_arguments


def force(points: torch.Tensor) -> torch.Tensor:
    return torch.sin(points.extract(["x"]) * torch.pi) * torch.sin(points.extract(["y"]) * torch.pi)


class Poisson(SpatialProblem):
    output_variables = ["u"]  # noqa: RUF012
    spatial_domain = CartesianDomain({"x": [0, 1], "y": [0, 1]})
    domains = {"edge": CartesianDomain({"x": [0, 1], "y": 0.0}), "inside": spatial_domain}  # noqa: RUF012
    conditions = {  # noqa: RUF012
        "edge": Condition(domain="edge", equation=FixedValue(0.0)),
        "inside": Condition(domain="inside", equation=PoissonEquation(force)),
    }


def fit(strategy: str) -> None:
    arguments = trainer_arguments(strategy)
    problem = Poisson()
    problem.discretise_domain(n=16, mode="random", domains=["edge", "inside"])
    model = FeedForward(input_dimensions=2, output_dimensions=1, layers=[16, 16])
    Trainer(PhysicsInformedSingleModelSolver(problem, model), batch_size=4, **arguments).train()


if __name__ == "__main__":
    on_two_ranks(fit)
