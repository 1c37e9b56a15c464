"""Residency: what is on the device, in host memory, on disk or destroyed in which phase of a step."""

from rollmill.residency.plan import Part, Plan, make_plan
from rollmill.residency.residency import Residency
from rollmill.residency.resident import Remade, Resident, Tensors

__all__ = ["Part", "Plan", "Remade", "Residency", "Resident", "Tensors", "make_plan"]
