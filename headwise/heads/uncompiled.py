"""Functions that torch.compile leaves alone. Imported only while code is compiled, because the import loads its compiler."""

import torch

from headwise.heads.site import _call_listeners

REASON = (
    "a listener is open (hw.record, site.listen); it runs between compiled parts, so fullgraph=True is not possible"
)
call_listeners = torch.compiler.disable(_call_listeners, reason=REASON)
