"""`taskset.order`: the order in which tasks are rolled out.

Every module of this package is searched for orders: a new one is a section with a `name` and its `implementation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.config.orders.base import OrderSection
from rollmill.config.section import find_sections, section_union

if TYPE_CHECKING:
    OrderConfig = OrderSection
else:
    OrderConfig = section_union(find_sections(__name__, __path__, OrderSection), kind="order")
