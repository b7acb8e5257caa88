"""Tables, figures, the report page, the live view, notebooks and the demo."""

from typing import TYPE_CHECKING

from headwise.lazy_import import make_lazy_getattr

if TYPE_CHECKING:
    from headwise.ui.head_summary import HeadSummary, describe

__all__ = ["HeadSummary", "describe"]

__getattr__ = make_lazy_getattr(__name__, {"head_summary": __all__})
