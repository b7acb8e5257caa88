"""Tables, figures, the report page, the live view, notebooks and the demo."""

from typing import TYPE_CHECKING

from headwise.lazy_import import lazy_names

if TYPE_CHECKING:
    from headwise.ui.head_summary import HeadSummary, describe

__all__ = ["HeadSummary", "describe"]

__getattr__ = lazy_names(__name__, {"head_summary": __all__})
